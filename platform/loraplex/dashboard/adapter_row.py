"""The list of adapters: a row each, from the names that this process has in memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from loraplex.stats.report import StatsReport
from loraplex_registry.wire.adapter import AdapterName, Target, VersionName

LIVE = "live"
NOT_LIVE = "not live"
QUARANTINED = "quarantined"
MAX_ROWS = 1000
STATES = ("ready", "validating", QUARANTINED, NOT_LIVE)
"""What an adapter can be: the state of its live version, or that none is, for which its newest may be the cause."""

TrafficKey = tuple[str | None, str | None]


class Traffic(msgspec.Struct, frozen=True):
    """Calls of one adapter in a window."""

    requests: int
    requests_error: int


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter; `rank` is that of the version with most weight, or of the newest where none is live.

    `is_newest_refused` where the newest version is quarantined, whatever is live.
    """

    tenant: str
    name: str
    is_default: bool
    base: str
    state: str
    live: tuple[Target, ...]
    latest: int | None
    is_newest_refused: bool
    num_versions: int
    rank: int | None
    is_full: bool
    traffic: Traffic | None


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapters are asked for: words of their names, and a state and a base that are theirs."""

    text: str = ""
    state: str = ""
    base: str = ""

    def takes(self, row: AdapterRow) -> bool:
        """Whether a row is asked for."""
        name = f"{row.tenant}/{row.name}"
        return (
            all(word in name for word in self.text.lower().split())
            and (self.state in ("", row.state) or (self.state == QUARANTINED and row.is_newest_refused))
            and self.base in ("", row.base)
        )


def build_rows(adapters: Iterable[AdapterName], traffic: Mapping[TrafficKey, Traffic] | None) -> list[AdapterRow]:
    """Return a row for each adapter; without `traffic` whoever asks may not see what is called."""
    return [_build_row(adapter, traffic) for adapter in adapters]


def read_traffic(report: StatsReport) -> dict[TrafficKey, Traffic]:
    """Return the calls of a report by adapter, which it must be by."""
    return {(row.tenant, row.adapter): Traffic(row.requests, row.requests_error) for row in report.rows}


def _build_row(adapter: AdapterName, traffic: Mapping[TrafficKey, Traffic] | None) -> AdapterRow:
    number_to_version = {version.number: version for version in adapter.versions}
    live = adapter.aliases.get(LIVE, ())
    main = _find_main(live, number_to_version)
    latest = max(number_to_version, default=None)
    shown = main or (None if latest is None else number_to_version[latest])
    is_newest_refused = latest is not None and number_to_version[latest].state == QUARANTINED
    found = None if traffic is None else traffic.get((adapter.tenant, adapter.name), Traffic(0, 0))
    return AdapterRow(
        tenant=adapter.tenant,
        name=adapter.name,
        is_default=adapter.is_default,
        base=adapter.base,
        state=main.state if main is not None else QUARANTINED if is_newest_refused else NOT_LIVE,
        live=live,
        latest=latest,
        is_newest_refused=is_newest_refused,
        num_versions=len(number_to_version),
        rank=None if shown is None or shown.kind == "full" else shown.rank,
        is_full=main is not None and main.kind == "full",
        traffic=found,
    )


def _find_main(live: Iterable[Target], number_to_version: Mapping[int, VersionName]) -> VersionName | None:
    """The version with the most weight, the lowest of equals, if it is there."""
    main = max(live, key=lambda target: (target.weight, -target.version), default=None)
    return None if main is None else number_to_version.get(main.version)
