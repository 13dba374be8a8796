"""`loraplex usage`: sums of tokens and requests."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from loraplex.cli.output import AsJson, print_json, print_table
from loraplex.cli.session import open_management

_GROUPS = ("tenant", "adapter", "version", "day")
_NUMBERS = ("requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens")
_FAILED = ("requests_error", "requests_lost")
"""Outcomes that the table sums up as errors; a request that its client gave up is none."""


def usage(
    *,
    tenant: str | None = None,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    stop: Annotated[str | None, Parameter(name="--to")] = None,
    group_by: Annotated[list[str] | None, Parameter(name="--group-by", negative=())] = None,
    as_json: AsJson = False,
) -> None:
    """Sum up what was used.

    Args:
        tenant: Only this one's.
        start: From this time on, RFC 3339 or a day as 2027-01-31.
        stop: Up to, but without, this time.
        group_by: tenant, adapter, version, day; with commas or repeated. Default tenant,adapter.
        as_json: Print JSON for programs.
    """
    groups = ",".join(group_by or ["tenant,adapter"])
    with open_management() as client:
        rows = client.list_usage(tenant=tenant, group_by=groups, **{"from": start, "to": stop})
    if as_json:
        print_json(rows)
        return
    rows = [row | {"errors": sum(row.get(name, 0) for name in _FAILED)} for row in rows]
    columns = [name for name in (*_GROUPS, *_NUMBERS) if any(name in row for row in rows)]
    print_table("Usage", columns, (_cells(row, columns) for row in rows), empty="Nothing was used in that time.")


def _cells(row: dict[str, Any], columns: list[str]) -> list[Any]:
    return [f"{row[name]:,}" if name in _NUMBERS and name in row else row.get(name) for name in columns]
