"""`loraplex config`: every setting, what holds and why; `config check`: whether a part would start with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from loraplex.cli.engine_flag import EngineFlags
from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, done, fail, print_json, print_table, say

if TYPE_CHECKING:
    from loraplex.config.listing import ShownSetting
    from loraplex.config.resolved import Resolved
    from loraplex_registry.wire.setting import UnknownSetting

PartName = Literal["gateway", "registry", "engine", "up", "client"]
_NO_FLAGS = EngineFlags()
_Flag = Annotated[str | None, Parameter(help="As the part takes it.")]
app = App(
    name="config",
    help="Show every setting, what holds and where it comes from; secrets are masked.",
    help_format="plaintext",
    help_epilogue=examples(
        "loraplex config",
        "loraplex config --part engine --max-loras 16",
        "LORAPLEX_DATABASE_URL=... loraplex config check --part gateway",
    ),
)


@app.default
def config(
    *,
    part: PartName | None = None,
    data_dir: Path | None = None,
    listen: _Flag = None,
    base: _Flag = None,
    registry_url: _Flag = None,
    served_model_name: _Flag = None,
    cache_dir: Path | None = None,
    engine_flags: EngineFlags = _NO_FLAGS,
    as_json: AsJson = False,
) -> None:
    """Show every setting of gateway, registry, engine and `up`: value, where it comes from, whether SIGHUP renews it.

    Sources are flag, environment, file (a variable X_FILE, or the data folder) and default. Give the flags of the part
    as it gets them to see what they change.

    Args:
        part: Only what this one reads.
        data_dir: The data folder, as for up.
        listen: HOST:PORT.
        base: The base, as for engine and up.
        registry_url: Where an engine finds the registry.
        served_model_name: Name of the base in the API.
        cache_dir: The machine-wide cache.
        engine_flags: As an engine takes them.
        as_json: Print JSON for programs.
    """
    from loraplex.config.listing import SERVERS, list_settings
    from loraplex.config.resolved import resolve

    flags = _collect(listen, base, registry_url, served_model_name, cache_dir, engine_flags)
    listing = list_settings([resolve(os.environ, one, flags, data_dir) for one in ([part] if part else SERVERS)])
    if as_json:
        print_json(listing)
    else:
        rows = [
            (one.name, _describe(one), _place(one), one.parts, "SIGHUP" if one.reloads else "start")
            for one in listing.settings
        ]
        print_table("Settings", ("setting", "value", "from", "read by", "at"), rows, empty="")
        _warn_of_unknown(listing.unknown)
    for problem in listing.problems:
        say(f"{problem.setting}: {problem.message}")


@app.command(help_epilogue=examples("loraplex config check", "loraplex config check --part engine --json"))
def check(
    *,
    part: PartName | None = None,
    data_dir: Path | None = None,
    listen: _Flag = None,
    base: _Flag = None,
    registry_url: _Flag = None,
    served_model_name: _Flag = None,
    cache_dir: Path | None = None,
    engine_flags: EngineFlags = _NO_FLAGS,
    as_json: AsJson = False,
) -> int:
    """Say everything that would keep a part from starting with these settings; the exit code is 1 if there is anything.

    It looks at settings alone and reaches nothing: for the rest there is loraplex doctor.

    Args:
        part: Which part; default the one that the environment is for, up if nothing says otherwise.
        data_dir: The data folder, as for up.
        listen: HOST:PORT.
        base: The base, as for engine and up.
        registry_url: Where an engine finds the registry.
        served_model_name: Name of the base in the API.
        cache_dir: The machine-wide cache.
        engine_flags: As an engine takes them.
        as_json: Print JSON for programs.
    """
    from loraplex.config.judge import judge
    from loraplex.config.resolved import choose_part, resolve
    from loraplex_registry.app import check_store_url, load_settings

    flags = _collect(listen, base, registry_url, served_model_name, cache_dir, engine_flags)
    resolved = resolve(os.environ, part or choose_part(os.environ), flags, data_dir)
    problems = judge(resolved, os.environ, load_settings, check_store_url)
    if as_json:
        print_json({"part": resolved.part, "is_valid": not problems, "problems": problems, "unknown": resolved.unknown})
        return 1 if problems else 0
    _warn_of_unknown([one for one in resolved.unknown if not one.is_fatal])
    for problem in problems:
        fail(problem.message, param=problem.setting)
    if not problems:
        done(f"The settings of {_name(resolved)} are valid.")
    return 1 if problems else 0


def _collect(
    listen: str | None,
    base: str | None,
    registry_url: str | None,
    served_model_name: str | None,
    cache_dir: Path | None,
    engine_flags: EngineFlags,
) -> dict[str, str]:
    """Return what flags give, by the settings that they win over."""
    given: dict[str, object] = {
        "LORAPLEX_LISTEN": listen,
        "LORAPLEX_ENGINE_BASE": base,
        "LORAPLEX_REGISTRY_URL": registry_url,
        "LORAPLEX_ENGINE_SERVED_MODEL_NAME": served_model_name,
        "LORAPLEX_CACHE_DIR": cache_dir,
    }
    for field in fields(engine_flags):
        value = getattr(engine_flags, field.name)
        given[f"LORAPLEX_ENGINE_{field.name.upper()}"] = int(value) if isinstance(value, bool) else value
    return {name: str(value) for name, value in given.items() if value is not None}


def _describe(one: ShownSetting) -> str:
    if one.value is not None:
        return one.value
    return f"({one.otherwise})" if one.otherwise else "-"


def _place(one: ShownSetting) -> str:
    if one.source == "file":
        return f"file {one.path}"
    return "" if one.source == "none" else one.source


def _warn_of_unknown(unknown: Sequence[UnknownSetting]) -> None:
    for one in unknown:
        what = "no part starts with it" if one.is_fatal else "it is ignored"
        near = f"; the nearest is {one.nearest}" if one.nearest else ""
        say(f"{one.name} is not a setting, and {what}{near}.")


def _name(resolved: Resolved) -> str:
    return f"`loraplex {resolved.part}`" if resolved.part in ("gateway", "engine", "up") else f"the {resolved.part}"
