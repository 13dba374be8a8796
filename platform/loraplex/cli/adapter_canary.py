"""`loraplex adapters outcomes` and `warm`: how versions do, and having them on the engines ahead of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.output import AsJson, done, fail, print_json, print_table, when
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.types import Outcomes

_COUNTS = ("requests", "ok", "cancelled", "error", "lost")


def outcomes(
    name: str,
    /,
    *,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    stop: Annotated[str | None, Parameter(name="--to")] = None,
    minutes: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Show how the requests of each version ended, so that a canary can be judged.

    Args:
        name: TENANT/ADAPTER, or with @NUMBER one version.
        start: From this time on, RFC 3339. Default: an hour before the end.
        stop: Up to, but without, this time. Default: now.
        minutes: A row for each minute instead of the sums.
        as_json: Print JSON for programs: always a row for each minute and version.
    """
    ref = parse_ref(name)
    number = None if ref.which is None else ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        rows = client.list_outcomes(ref.tenant, adapter, version=number, **{"from": start, "to": stop})
    if as_json:
        print_json(rows)
        return
    shown = rows if minutes else sum_up(rows)
    print_table(
        f"Outcomes of {ref.tenant}/{adapter}",
        (*(["minute"] if minutes else []), "version", *_COUNTS, "failed"),
        (
            (*([when(row.minute)] if minutes else []), row.version, *_read_counts(row), _show_failed(row))
            for row in shown
        ),
        empty="Nobody called it in that time.",
    )


def warm(name: str, /, *, as_json: AsJson = False) -> None:
    """Load a version on every engine of its base, so that its first request does not wait.

    Args:
        name: TENANT/ADAPTER@NUMBER; the version must be ready.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    number = ref.require_number()
    with open_management() as client:
        adapter = client.resolve_adapter(ref)
        replicas = client.warm(ref.tenant, adapter, number)
    cold = [replica for replica in replicas if replica.problem is not None]
    if as_json:
        print_json(replicas)
    else:
        for replica in cold:
            fail(f"{replica.replica}: {replica.problem}")
    full = f"{ref.tenant}/{adapter}@{number}"
    if cold:
        raise ClientError(f"{len(cold)} of {len(replicas)} engines have not loaded {full}.", code="adapter_loading")
    if not as_json:
        done(f"{full} is loaded on {len(replicas)} engine{'' if len(replicas) == 1 else 's'}.")


def sum_up(rows: Sequence[Outcomes]) -> list[Outcomes]:
    """Return one row a version, newest version first."""
    versions = sorted({row.version for row in rows}, reverse=True)
    sums = []
    for version in versions:
        counts = zip(*(_read_counts(row) for row in rows if row.version == version), strict=True)
        requests, ok, cancelled, error, lost = (sum(column) for column in counts)
        sums.append(
            Outcomes(minute="", version=version, requests=requests, ok=ok, cancelled=cancelled, error=error, lost=lost)
        )
    return sums


def _read_counts(row: Outcomes) -> tuple[int, ...]:
    return (row.requests, row.ok, row.cancelled, row.error, row.lost)


def _show_failed(row: Outcomes) -> str:
    """Return the share of requests that failed; those that their clients gave up are none."""
    return f"{100 * (row.error + row.lost) / row.requests:.1f} %" if row.requests else ""
