"""`loraplex audit`: who did what."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli.output import AsJson, print_json, print_table
from loraplex.cli.session import open_management
from loraplex.client.errors import ClientError
from loraplex.client.types import Event

_TO_SECOND = len("2027-01-31T00:00:00")
_MAX_DETAIL_LEN = 100


def audit(
    *,
    tenant: str | None = None,
    actor: str | None = None,
    action: str | None = None,
    subject: str | None = None,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    stop: Annotated[str | None, Parameter(name="--to")] = None,
    key_id: str | None = None,
    request_id: Annotated[str | None, Parameter(name=("--request-id", "--request"))] = None,
    limit: int = 50,
    as_json: AsJson = False,
) -> None:
    """List what was done, newest first, to tenants, keys, bases, adapters, versions and aliases; or in a request.

    Args:
        tenant: Only what was done to this one.
        actor: Only by this owner of a key.
        action: Only this act, as alias.set.
        subject: Only to this thing, as team-x/support@4.
        start: From this time on, RFC 3339.
        stop: Up to, but without, this time.
        key_id: Only with this key.
        request_id: Only in this request; if it was a generation, also which content answered it.
        limit: As many at most. Default 50.
        as_json: Print JSON for programs.
    """
    if limit < 1:
        raise ClientError("The limit is 1 or more.", code="invalid_request_error", param="limit")
    params = {"from": start, "to": stop, "key_id": key_id, "request_id": request_id}
    with open_management() as client:
        events = client.list_events(limit, tenant=tenant, actor=actor, action=action, subject=subject, **params)
    if as_json:
        print_json(events)
        return
    max_len = _MAX_DETAIL_LEN if request_id is None else None
    print_table(
        "Events",
        ("at", "what", "tenant", "to", "by", "details"),
        (
            (
                _show_time(event.at),
                event.action,
                event.tenant,
                event.subject,
                event.actor,
                _show_details(event, max_len),
            )
            for event in events
        ),
        empty="Nothing was done that fits.",
    )


def _show_time(time: str) -> str:
    return time[:_TO_SECOND].replace("T", " ")


def _show_details(event: Event, max_len: int | None) -> str:
    text = json.dumps(event.details, ensure_ascii=False, sort_keys=True) if event.details else ""
    return text if max_len is None or len(text) <= max_len else text[: max_len - 1] + "…"
