"""`loraplex usage`: sums of tokens and requests, the rows behind them, and both against what engines counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, print_json, print_table, say
from loraplex.cli.session import open_management
from loraplex.cli.spreadsheet import AsCsv, print_csv
from loraplex.client.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraplex.client.types import ReplicaReconciliation

app = App(
    name="usage",
    help="Sum up tokens and requests.",
    help_format="plaintext",
    help_epilogue=examples("loraplex usage --from 2027-01-01 --group-by tenant,day", "loraplex usage --csv"),
)
From = Annotated[str | None, Parameter(name="--from")]
To = Annotated[str | None, Parameter(name="--to")]

_GROUPS = ("tenant", "adapter", "version", "key", "day")
_NUMBERS = ("requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")
_FAILED = ("requests_error", "requests_lost")
"""Outcomes that the table sums up as errors; a request that its client gave up is none."""

_SHOWN = ("created_at", "request_id", "model", "outcome", "prompt_tokens", "cached_tokens", "completion_tokens")
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")
_SIDES = ("engine", "usage", "pending", "difference")


@app.default
def usage(
    *,
    tenant: str | None = None,
    start: From = None,
    stop: To = None,
    group_by: Annotated[list[str] | None, Parameter(name="--group-by", negative=())] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Sum up what was used.

    Args:
        tenant: Only this one's.
        start: From this time on, RFC 3339 or a day as 2027-01-31.
        stop: Up to, but without, this time.
        group_by: tenant, adapter, version, key, day; with commas or repeated. Default tenant,adapter.
        as_json: Print JSON for programs.
        as_csv: Print all columns as CSV.
    """
    groups = ",".join(group_by or ["tenant,adapter"])
    with open_management() as client:
        rows = client.list_usage(tenant=tenant, group_by=groups, **{"from": start, "to": stop})
    if as_json or as_csv:
        _print_data(rows, groups.split(","), as_csv=as_csv)
        return
    rows = [row | {"errors": sum(row.get(name, 0) for name in _FAILED)} for row in rows]
    columns = [name for name in (*_GROUPS, *_NUMBERS) if any(name in row for row in rows)]
    print_table("Usage", columns, (_cells(row, columns) for row in rows), empty="Nothing was used in that time.")


@app.command(
    help_epilogue=examples(
        "loraplex usage requests --tenant team-x", "loraplex usage requests --from 2027-01-01 --limit 0 --csv"
    )
)
def requests(
    *,
    tenant: str | None = None,
    start: From = None,
    stop: To = None,
    adapter: str | None = None,
    digest: str | None = None,
    key: str | None = None,
    outcome: str | None = None,
    limit: int = 50,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """List usage request by request, newest first: what the sums are sums of.

    Args:
        tenant: Only this one's.
        start: From this time on, RFC 3339 or a day as 2027-01-31.
        stop: Up to, but without, this time.
        adapter: Only this adapter's.
        digest: Only what was answered with this content.
        key: Only this key's, by its id.
        outcome: ok, cancelled, error or lost.
        limit: As many at most; 0 for all. Default 50.
        as_json: Print JSON for programs.
        as_csv: Print all columns as CSV.
    """
    if limit < 0:
        raise ClientError("The limit is 0 or more.", code="invalid_request_error", param="limit")
    exact = {"adapter": adapter, "digest": digest, "key": key, "outcome": outcome}
    with open_management() as client:
        rows = client.list_usage_rows(limit or None, tenant=tenant, **{"from": start, "to": stop}, **exact)
    if as_json or as_csv:
        _print_data(rows, (), as_csv=as_csv)
        return
    cells = ([row.get(name) for name in _SHOWN] for row in rows)
    print_table("Requests", _SHOWN, cells, empty="Nothing was used that fits.")


@app.command(help_epilogue=examples("loraplex usage reconcile"))
def reconcile(*, as_json: AsJson = False) -> int:
    """Hold the usage rows against what the engines counted themselves; ends with 1 if they differ.

    Args:
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        found = client.reconcile_usage()
    if as_json:
        print_json(found)
        return int(not found.is_exact)
    print_table(
        "Usage against engines",
        ("engine since", "replica", "of", *_SIDES),
        (row for replica in found.data if replica.problem is None for row in _compare(replica)),
        empty="No engine was asked.",
    )
    for replica in found.data:
        if replica.problem is not None:
            say(f"{replica.replica}: {replica.problem}")
        if replica.lost:
            say(f"{replica.replica}: {replica.lost} requests were settled without the engine's word (lost)")
        for mismatch in replica.mismatches:
            sides = ((side, getattr(mismatch, side)) for side in ("engine", "usage"))
            told = (f"{side}: {'unknown' if one is None else _show(msgspec.to_builtins(one))}" for side, one in sides)
            say(f"{replica.replica}: {mismatch.request_id}: {'; '.join(told)}")
    if found.is_exact:
        say("Usage is what the engines counted.")
    return int(not found.is_exact)


def _print_data(rows: Sequence[dict[str, Any]], first: Sequence[str], *, as_csv: bool) -> None:
    if as_csv:
        print_csv(rows, first)
    else:
        print_json(rows)


def _compare(replica: ReplicaReconciliation) -> list[list[Any]]:
    sides = [getattr(replica, side) for side in _SIDES]
    return [
        [replica.began_at, replica.replica, name, *(f"{getattr(side, name):,}" for side in sides)] for name in _COUNTS
    ]


def _show(counted: dict[str, int]) -> str:
    return ", ".join(f"{counted[name]:,} {name.replace('_', ' ')}" for name in _COUNTS[1:])


def _cells(row: dict[str, Any], columns: list[str]) -> list[Any]:
    return [f"{row[name]:,}" if name in _NUMBERS and name in row else row.get(name) for name in columns]
