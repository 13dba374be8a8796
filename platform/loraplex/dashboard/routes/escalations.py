"""Escalations: the list with the report on all, and one with its evidence, its figures, its history and its verbs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath

from loraplex.dashboard.form import read_form
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.routes.escalation_opening import build_escalation_opening
from loraplex.dashboard.section import Desk, Section
from loraplex.errors import InvalidRequestError, NotFoundError
from loraplex.escalations.act import Registration
from loraplex.escalations.machine import State
from loraplex.escalations.record import WholeEscalationView
from loraplex.gateway.body import convert, parse_time
from loraplex.gateway.paging import build_list, read_page, read_query
from loraplex.gateway.routes.escalations import (
    EscalationApprove,
    check_id,
    check_reason,
    collect_report,
    enter,
    read_approval,
    read_state,
    require_reader,
)
from loraplex_registry.wire.identity import Identity

_WRITE = "escalations:write"
_OF_OWNERS = ("revert", "close")
_PAGE = "/ui/escalations/{escalation:str}"
_REVIEW_DAYS = 90
_WAIT_S = 30.0
_STATES: tuple[State, ...] = (
    "requested",
    "approved",
    "registered",
    "active",
    "overdue",
    "closed",
    "rejected",
    "expired",
)
_VERB_TO_DONE: dict[str, str] = {
    "approve": "Approved.",
    "reject": "Rejected.",
    "register": "Registered.",
    "activate": "The full fine-tune is live.",
    "extend": "The review date is moved.",
    "revert": "What was live before is live again.",
    "close": "Closed.",
}


def build_escalations(desk: Desk) -> Section:
    """Return the pages and the routes of verbs."""
    entry = Entry("/ui/escalations", "Escalations", scope=_WRITE, also_platform=True)
    handlers = [_build_list(desk), *build_escalation_opening(desk), _build_one(desk), _build_verbs(desk)]
    return Section(entries=[entry], handlers=handlers)


def _build_list(desk: Desk) -> Any:
    service = desk.parts.escalations

    @get("/ui/escalations")
    async def show_list(request: Request[Any, Any, Any]) -> Response[str]:
        by = require_reader(request)
        page, query = read_page(request, {"state"})
        state = query.get("state") or None
        found = await service.list_all(by, None, read_state(state), page.before, page.limit + 1)
        listed = build_list([{"id": key, "view": view} for key, view in found], page, lambda row: row["view"])
        report = await collect_report(service, by) if by.is_platform else None
        return desk.pages.show(
            request,
            "escalations.html",
            rows=listed["data"],
            cursor=listed["next_cursor"],
            state=state or "",
            choices=[("", "All"), *((name, name.capitalize()) for name in _STATES)],
            report=report,
        )

    return show_list


def _build_one(desk: Desk) -> Any:
    @get(_PAGE)
    async def show_one(request: Request[Any, Any, Any], escalation: FromPath[str]) -> Response[str]:
        by = require_reader(request)
        read_query(request, ())
        found = await desk.parts.escalations.get(by, check_id(escalation))
        verbs = [verb for verb in found.verbs if _may(by, verb)]
        return desk.pages.show(
            request,
            "escalation.html",
            found=found,
            verbs=verbs,
            is_own=_is_own(by, found),
            review_at=(datetime.now(UTC) + timedelta(days=_REVIEW_DAYS)).date().isoformat(),
            pools=sorted(pool.name for pool in desk.parts.fleet.pools if pool.model is not None),
        )

    return show_one


def _build_verbs(desk: Desk) -> Any:
    @post(_PAGE + "/{verb:str}", status_code=200)
    async def do(request: Request[Any, Any, Any], escalation: FromPath[str], verb: FromPath[str]) -> Response[bytes]:
        if verb not in _VERB_TO_DONE:
            raise NotFoundError("There is no such verb.")
        by = await enter(request, desk.parts.escalations, escalation, is_for_owners=verb in _OF_OWNERS)
        await _act(desk, by, escalation, verb, await read_form(request))
        place = {"path": f"/ui/escalations/{escalation}", "target": "#main", "select": "#main > *", "swap": "innerHTML"}
        toast = {"toast": {"text": _VERB_TO_DONE[verb], "tone": "ok"}}
        headers = {"hx-location": json.dumps(place), "hx-trigger": json.dumps(toast), "cache-control": "no-store"}
        return Response(b"", headers=headers)

    return do


async def _act(desk: Desk, by: Identity, escalation: str, verb: str, form: Mapping[str, str]) -> None:
    service, reason = desk.parts.escalations, check_reason(form.get("reason"), "reason")
    match verb:
        case "approve":
            fields = dict(form) | {
                "budget_per_month": _read_amount(form, "budget_per_month"),
                "review_at": parse_time(form.get("review_at", ""), "review_at"),
            }
            await service.approve(by, escalation, read_approval(convert(fields, EscalationApprove)))
        case "reject":
            if reason is None:
                raise InvalidRequestError("reason is required", param="reason")
            await service.reject(by, escalation, reason)
        case "register":
            cost = _read_amount(form, "cost_per_month") if "cost_per_month" in form else None
            wanted = Registration(pool=form.get("pool", ""), digest=form.get("digest", ""), cost_per_month=cost)
            await service.register(by, escalation, wanted)
        case "activate":
            await service.activate(by, escalation, _WAIT_S)
        case "extend":
            await service.extend(by, escalation, parse_time(form.get("review_at", ""), "review_at"), reason)
        case "revert":
            await service.revert(by, escalation, reason)
        case "close":
            await service.close(by, escalation, reason)


def _may(by: Identity, verb: str) -> bool:
    return by.is_admin or (verb in _OF_OWNERS and by.has_scope(_WRITE))


def _is_own(by: Identity, found: WholeEscalationView) -> bool:
    """Whether it was asked for by the owner of this key, so that another one has to approve it."""
    return by.actor.strip().casefold() == found.requested_by.strip().casefold()


def _read_amount(form: Mapping[str, str], name: str) -> float:
    try:
        return float(form.get(name, ""))
    except ValueError as error:
        raise InvalidRequestError(f"{name} is an amount such as 2500", param=name) from error
