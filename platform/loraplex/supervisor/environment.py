"""Which child is told what: each gets the settings of its own part, and never another's secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loraplex_registry.wire.setting import PREFIX, SETTINGS

_STORE_CREDENTIALS = "AWS_"


def build_environment(environ: Mapping[str, str], part: str) -> dict[str, str]:
    """Return the part of the environment that a child of kind `part` may see.

    Settings of other parts are left out, and for an engine the object store's credentials too.
    """
    own = {setting.name for setting in SETTINGS if part in setting.parts}
    return {
        name: value
        for name, value in environ.items()
        if (not name.startswith(PREFIX) or name.removesuffix("_FILE") in own)
        and not (part == "engine" and name.startswith(_STORE_CREDENTIALS))
    }


def give_default(env: dict[str, str], name: str, value: str) -> None:
    """Set `name` unless the user did, by value or by file."""
    if not env.get(name) and not env.get(f"{name}_FILE"):
        env[name] = value


def give_default_file(env: dict[str, str], name: str, path: Path) -> None:
    """Point `name` at a file unless the user set it, by value or by file."""
    if not env.get(name) and not env.get(f"{name}_FILE"):
        env[f"{name}_FILE"] = str(path)
