"""`loraplex adapters check`: judges a folder with the registry's own rules, on this machine, without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from loraplex.cli.adapter_push import tell_left_out
from loraplex.cli.output import AsJson, fail, print_json, stdout
from loraplex.cli.report import print_report
from loraplex.client.errors import ClientError
from loraplex.client.upload import choose_files
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.unreadable import UNREADABLE


def check(
    folder: Path,
    /,
    *,
    base: str | None = None,
    max_lora_rank: int | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> int:
    """Judge a folder as the registry would; the exit code is 1 if it would be refused.

    Args:
        folder: The folder that PEFT's save_pretrained wrote.
        base: A base in this machine's cache; default is the one that the adapter's config names.
        max_lora_rank: The platform's limit, if it is not 64.
        verbose: Also name the checks that passed.
        as_json: Print JSON for programs.
    """
    from loraplex_registry.peft.check import check_adapter

    chosen = choose_files(folder)
    files = {path.name: path for path in chosen.sent}
    spec = choose_base(load_bases(), base, files.get("adapter_config.json"))
    if max_lora_rank is not None:
        spec = msgspec.structs.replace(spec, max_lora_rank=max_lora_rank)
    report, plan = check_adapter(files, spec)
    if as_json:
        digest = plan.digest if plan else None
        print_json({"base": spec.name, "digest": digest, "report": report, "left_out": chosen.left_out})
    else:
        tell_left_out(chosen.left_out)
        print_report(stdout(), report, all_checks=verbose)
        if plan:
            stdout().print(f"fits {spec.name}, rank {plan.rank}, {', '.join(plan.target_modules)}: {plan.digest}")
        else:
            fail(f"{folder} does not fit {spec.name}.", code="adapter_rejected")
    return 0 if plan else 1


def load_bases() -> list[BaseSpec]:
    """Return the facts of every base in the cache."""
    from loraplex_registry.wire.setting import read_settings

    cache = Path(read_settings(os.environ, "client")["cache_dir"]).expanduser()
    return [_read_base(path) for path in sorted(cache.glob("bases/*/base.json"))]


def _read_base(path: Path) -> BaseSpec:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BaseSpec)
    except (OSError, *UNREADABLE) as error:
        raise ClientError(f"{path} cannot be read ({error}); pull the base again.", code="base_mismatch") from error


def choose_base(bases: list[BaseSpec], told: str | None, config: Path | None) -> BaseSpec:
    """Return the base that was told, else the one that the config names, else the only one there is.

    Raises:
        ClientError: There is none such.
    """
    from loraplex_registry.peft.base_rule import matches_base

    wanted = told or _read_base_name(config)
    found = [base for base in bases if matches_base(wanted, base)] or ([] if told else bases[:1] * (len(bases) == 1))
    if found:
        return found[0]
    have = ", ".join(base.name for base in bases) or "none"
    raise ClientError(
        f"This machine has no base {wanted!r} (it has: {have}). Fetch it with `loraplex base pull`, or name one that "
        "it has with --base.",
        code="base_mismatch",
        param="base",
    )


def _read_base_name(config: Path | None) -> str:
    """Return what the config says, or nothing where it cannot be read; the check proper will say so."""
    try:
        value = msgspec.json.decode(config.read_bytes())["base_model_name_or_path"] if config else ""
    except (OSError, *UNREADABLE, KeyError, TypeError):
        return ""
    return value if isinstance(value, str) else ""
