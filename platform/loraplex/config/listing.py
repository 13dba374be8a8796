"""Settings as they are shown: one row for all parts that have the same, secrets masked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.config.resolved import Resolved, SettingProblem
from loraplex_registry.wire.setting import SETTINGS, FoundSetting, UnknownSetting, mask

SERVERS = ("gateway", "registry", "engine", "up")


class ShownSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in some parts: `value` is masked and None where there is none; then `otherwise` says what holds.

    `source` is flag, environment, file (then `path` is which), default or none. `reloads` are those of its parts that
    read it anew on SIGHUP; others must be started again.
    """

    name: str
    parts: list[str]
    value: str | None
    source: str
    path: str | None
    otherwise: str
    is_secret: bool
    reloads: list[str]
    meaning: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """All that `loraplex config` knows; `problems` keep a part from starting, or its setting from being read."""

    settings: list[ShownSetting]
    unknown: list[UnknownSetting]
    problems: list[SettingProblem]


def list_settings(resolved: Sequence[Resolved]) -> Listing:
    """Return the settings of some parts in the order of the table."""
    shown = []
    for setting in SETTINGS:
        if not setting.is_built:
            continue
        same: list[tuple[FoundSetting, list[str]]] = []
        for one in resolved:
            if (found := one.settings.get(setting.name)) is not None:
                parts = next((parts for other, parts in same if other == found), None)
                if parts is None:
                    same.append((found, [one.part]))
                else:
                    parts.append(one.part)
        shown += [_show(found, parts) for found, parts in same]
    problems = list(dict.fromkeys(problem for one in resolved for problem in one.problems))
    return Listing(settings=shown, unknown=resolved[0].unknown, problems=problems)


def _show(found: FoundSetting, parts: list[str]) -> ShownSetting:
    setting = found.setting
    return ShownSetting(
        name=setting.name,
        parts=parts,
        value=None if found.value is None else mask(setting, found.value),
        source=found.source,
        path=found.path,
        otherwise=setting.otherwise,
        is_secret=setting.is_secret,
        reloads=[part for part in parts if part in setting.reloads],
        meaning=setting.meaning,
    )
