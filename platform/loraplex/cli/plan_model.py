"""Finds the config of the model that `loraplex plan` is asked about: preset, folder, pulled base, hub."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from loraplex.client.errors import ClientError
from loraplex_registry.peft.unreadable import UNREADABLE

_CONFIG = "config.json"
_HUB_S = 5.0


def resolve_model(name: str) -> tuple[str, dict[str, Any] | None]:
    """Return the model's name and its config; None: it is a preset.

    Raises:
        ClientError: Nobody knows it; the message says what can be named.
    """
    from loraplex.plan.preset import PRESETS, find_preset

    folder = Path(name)
    if (folder / _CONFIG).is_file():
        return folder.resolve().name, _read_config(folder / _CONFIG)
    if folder.is_dir():
        raise ClientError(f"{name} has no {_CONFIG}.", code="not_found", param="model")
    preset = find_preset(name)
    if preset is not None:
        return preset[0], None
    pulled = _find_pulled(name)
    if pulled is not None:
        return name, _read_config(pulled)
    if name.count("/") == 1:
        return name, _read_config(_fetch(name))
    raise ClientError(
        f"There is no model {name!r}: name one of {', '.join(PRESETS)}, a folder with {_CONFIG}, a pulled base, or a "
        "hub id such as HuggingFaceTB/SmolLM2-360M.",
        code="not_found",
        param="model",
    )


def _find_pulled(name: str) -> Path | None:
    from loraplex_registry.wire.setting import read_settings

    bases = Path(read_settings(os.environ, "client")["cache_dir"]).expanduser() / "bases"
    return next((path for path in bases.glob(f"*/{_CONFIG}") if path.parent.name == name), None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise ClientError(f"{path} is no JSON object: {error}.", code="invalid_json", param="model") from error


def _fetch(repo_id: str) -> Path:
    """Fetch one small file from the hub, 5 s in all: looking up the hub's address has no time limit of its own."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ClientError(
            f"{repo_id} is on the hub, and that needs huggingface_hub: install loraplex[engine], or name a folder.",
            code="not_found",
            param="model",
        ) from error
    answer: list[str | Exception] = []

    def ask() -> None:
        try:
            answer.append(hf_hub_download(repo_id, _CONFIG, etag_timeout=_HUB_S))
        except Exception as error:  # noqa: BLE001 - told below
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_S)
    found = answer[0] if answer else TimeoutError(f"no answer in {_HUB_S:.0f} s")
    if isinstance(found, Exception):
        lines = str(found).strip().splitlines()
        raise ClientError(
            f"The config of {repo_id} cannot be fetched from the hub ({lines[0] if lines else type(found).__name__}): "
            "name a preset, or a folder with its config.json.",
            code="unavailable",
            param="model",
        ) from found
    return Path(found)
