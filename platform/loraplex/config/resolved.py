"""Every setting of one part with its source: flags first, then the environment, files, the data folder, defaults.

Reads what the part itself would read when it starts, makes nothing, and goes on where one setting is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.client.location import default_data_dir
from loraplex.keys.files import ADMIN_KEY_FILE, PEPPER_FILE, SIGNING_KEY_FILE
from loraplex.supervisor.data_folder import DataFolder
from loraplex_registry.wire.setting import (
    SETTINGS,
    FoundSetting,
    SettingError,
    UnknownSetting,
    find_setting,
    find_unknown,
)

_CONTROL = ("gateway", "registry", "up")
_KEY_FILES = {
    "LORAPLEX_ADMIN_KEY": ADMIN_KEY_FILE,
    "LORAPLEX_KEY_PEPPER": PEPPER_FILE,
    "LORAPLEX_SIGNING_KEY": SIGNING_KEY_FILE,
}
_ENGINE_KEY = "LORAPLEX_ENGINE_KEY"
_NEEDS_DATABASE = ("LORAPLEX_DATABASE_URL", "LORAPLEX_OBJECT_STORE_URL")


@dataclass(frozen=True)
class SettingProblem:
    """What is wrong with a setting; `message` says what to do, and holds no secret."""

    setting: str
    message: str


@dataclass(frozen=True)
class Resolved:
    """The settings of one part by name; those that cannot be read are among `problems` instead."""

    part: str
    settings: dict[str, FoundSetting]
    problems: list[SettingProblem]
    unknown: list[UnknownSetting]
    folder: DataFolder | None = field(default=None, repr=False)
    """The data folder, where the part has one."""

    def value(self, name: str) -> str | None:
        """Return the text of a setting, None where nothing is known."""
        found = self.settings.get(name)
        return found.value if found is not None else None


def resolve(
    environ: Mapping[str, str], part: str, flags: Mapping[str, str] | None = None, data_dir: Path | None = None
) -> Resolved:
    """Return what `part` would be told.

    Args:
        environ: The environment.
        part: gateway, registry, engine, up or client.
        flags: What the command line gives, by the setting's name.
        data_dir: The data folder, where a flag names it.
    """
    given = dict(flags or {})
    if data_dir is not None:
        given["LORAPLEX_DATA_DIR"] = str(data_dir)
    settings: dict[str, FoundSetting] = {}
    problems = []
    for setting in SETTINGS:
        if part not in setting.parts:
            continue
        if setting.name in given:
            settings[setting.name] = FoundSetting(setting, given[setting.name], "flag")
            continue
        try:
            settings[setting.name] = find_setting(environ, setting, part)
        except SettingError as error:
            problems.append(SettingProblem(setting.name, error.message))
    folder = _find_folder(environ, part, settings)
    if folder is not None and part in _CONTROL:
        settings |= {name: _in_folder(found, folder, part) for name, found in settings.items()}
    return Resolved(part, settings, problems, list(find_unknown(environ)), folder)


def choose_part(environ: Mapping[str, str]) -> str:
    """Return the part whose environment this looks like; `up` where nothing says otherwise."""

    def has(*names: str) -> bool:
        return any(environ.get(name) or environ.get(f"{name}_FILE") for name in names)

    if has(*_NEEDS_DATABASE, "LORAPLEX_POOLS"):
        # a registry of its own has no private key, only public ones
        return "registry" if has("LORAPLEX_VERIFY_KEYS") and not has("LORAPLEX_SIGNING_KEY") else "gateway"
    if has("LORAPLEX_VERIFY_KEYS", "LORAPLEX_REGISTRY_URL"):
        return "engine"
    return "client" if has("LORAPLEX_URL") else "up"


def _find_folder(environ: Mapping[str, str], part: str, settings: Mapping[str, FoundSetting]) -> DataFolder | None:
    found = settings.get("LORAPLEX_DATA_DIR")
    if found is not None and found.value:
        return DataFolder(Path(found.value))
    return DataFolder(default_data_dir(environ)) if part in ("up", "client") else None


def _in_folder(found: FoundSetting, folder: DataFolder, part: str) -> FoundSetting:
    """Return what the data folder gives for a setting that nobody set; else the setting as it is."""
    name = found.setting.name
    if found.value is not None:
        return found
    if name == "LORAPLEX_DATA_DIR":
        return FoundSetting(found.setting, str(folder.path), "default")
    if name == "LORAPLEX_DATABASE_URL":
        return FoundSetting(found.setting, folder.database_url, "default")
    if name == "LORAPLEX_OBJECT_STORE_URL":
        return FoundSetting(found.setting, folder.object_store_url, "default")
    file = _KEY_FILES.get(name) if part != "registry" else None
    if name == _ENGINE_KEY and part == "up":
        file = folder.engine_key.name
    return _read_key(found, folder.path / file) if file is not None else found


def _read_key(found: FoundSetting, path: Path) -> FoundSetting:
    try:
        return FoundSetting(found.setting, path.read_text(encoding="utf-8").strip(), "file", str(path))
    except (OSError, UnicodeDecodeError):
        # it is made at first start; doctor says of one that is there and cannot be read
        return found
