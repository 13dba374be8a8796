"""Opening an escalation: the form for administrators, and the route that takes what the API's route takes.

The names of fields are those of the API's body, so that a refusal names the field beside which it is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from litestar import Request, Response, get, post

from loraplex.dashboard.form import read_form
from loraplex.dashboard.routes.adapters import aim
from loraplex.dashboard.section import Desk
from loraplex.errors import InvalidRequestError
from loraplex.escalations.evidence import MAX_RANKS
from loraplex.escalations.machine import REQUEST_LIFE
from loraplex.escalations.opening import MAX_LIFE
from loraplex.gateway.body import convert, parse_time
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_admin
from loraplex.gateway.routes.escalations import EscalationOpen, read_opening

_PAGE = "/ui/escalations/open"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_RANK = re.compile(r"evidence\.ranks_tried\[([0-9]{1,2})\]\.(rank|value)")
_EVIDENCE = ("evaluation", "data_digest", "num_samples", "metric", "base", "lora", "target")
_NUMBERS = ("num_samples", "base", "lora", "target")
_NUM_SHOWN_RANKS = 2
_DONE = "Opened. Another administrator approves it, with a key that another issued."


def build_escalation_opening(desk: Desk) -> list[Any]:
    """Return the form and its route."""

    @get(_PAGE)
    async def show_form(request: Request[Any, Any, Any]) -> Response[str]:
        require_admin(request)
        read_query(request, ())
        await desk.parts.names.ensure_fresh()
        adapters = desk.parts.names.adapters()
        today = datetime.now(UTC)
        return desk.pages.show(
            request,
            "escalation_open.html",
            adapters=adapters,
            tenants=sorted({one.tenant for one in adapters}),
            num_ranks=_NUM_SHOWN_RANKS,
            max_ranks=MAX_RANKS,
            life_days=REQUEST_LIFE.days,
            max_days=MAX_LIFE.days,
            first_day=(today + timedelta(days=1)).date().isoformat(),
            last_day=(today + MAX_LIFE).date().isoformat(),
        )

    @post(_PAGE, status_code=200)
    async def open_one(request: Request[Any, Any, Any]) -> Response[bytes]:
        by = require_admin(request)
        form = await read_form(request)
        if "tenant" not in form:
            raise InvalidRequestError("tenant is missing", param="tenant")
        wanted = read_opening(convert(_build_body(form), EscalationOpen))
        answer = await desk.parts.escalations.open(aim(desk, by, form["tenant"]), wanted, None)
        place = {"path": f"/ui/escalations/{msgspec.json.decode(answer.body)['id']}", "target": "#main"}
        headers = {
            "hx-location": json.dumps(place | {"select": "#main > *", "swap": "innerHTML"}),
            "hx-trigger": json.dumps({"toast": {"text": _DONE, "tone": "ok"}}),
            "cache-control": "no-store",
        }
        return Response(b"", headers=headers)

    return [show_form, open_one]


def _build_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Return a form as the API's body; what should be a number and is none stays text, for the API's refusal."""
    body: dict[str, Any] = {name: form[name] for name in ("adapter", "reason") if name in form}
    if "version" in form:
        body["version"] = _read_number(form["version"])
    if "expires_at" in form:
        body["expires_at"] = parse_time(form["expires_at"], "expires_at")
    evidence: dict[str, Any] = {
        name: _read_number(form[f"evidence.{name}"]) if name in _NUMBERS else form[f"evidence.{name}"]
        for name in _EVIDENCE
        if f"evidence.{name}" in form
    }
    return body | {"evidence": evidence | {"ranks_tried": _list_ranks(form)}}


def _list_ranks(form: Mapping[str, str]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, text in form.items():
        if match := _RANK.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = _read_number(text)
    return [found[index] for index in sorted(found)]


def _read_number(text: str) -> float | str:
    if _NUMBER.fullmatch(text) is None:
        return text
    return int(text) if text.isdigit() else float(text)
