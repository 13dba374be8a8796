"""/api/v1/escalations: opened by teams, moved by administrators; a team may take its own back and end it."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import msgspec
from litestar import Request, Response, Router, get, post
from litestar.params import FromPath

from loraplex.db.idempotency import check_idempotency_key
from loraplex.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from loraplex.escalations.act import Approval, EscalationOpening, Registration
from loraplex.escalations.evidence import Evidence
from loraplex.escalations.machine import State
from loraplex.escalations.record import WholeEscalationView
from loraplex.escalations.report import EscalationReport, build_report
from loraplex.escalations.service import EscalationService
from loraplex.gateway.authentication import target
from loraplex.gateway.body import check_text, read_body, to_utc
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import build_list, read_page, read_query
from loraplex.gateway.permission import get_identity, require_admin, require_platform, require_scope
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.naming import is_name

_WRITE = "escalations:write"
_MAX_REASON_LEN = 2000
_REPORT_PAGE = 200
_ID = re.compile(r"esc_[a-z2-7]{26}")
_Time = Annotated[datetime, msgspec.Meta(tz=True)]
_T = TypeVar("_T")


class EscalationOpen(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tenants/{tenant}/escalations; without `version` the live one is meant."""

    adapter: str
    evidence: Evidence
    version: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    reason: str | None = None
    expires_at: _Time | None = None


class EscalationApprove(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/approve."""

    owner: str
    justification: str
    budget_per_month: float
    review_at: _Time
    currency: str | None = None
    on_overdue: Literal["keep", "revert"] | None = None


class EscalationReject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/reject."""

    reason: str


class EscalationRegister(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/register; without `cost_per_month` it costs what was approved."""

    pool: str
    digest: str
    cost_per_month: float | None = None


class EscalationActivate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/activate: how many seconds to wait for the pool."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0


class EscalationExtend(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/extend."""

    review_at: _Time
    reason: str | None = None


class EscalationReason(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /escalations/{id}/revert and close, which may also be left out."""

    reason: str | None = None


def build_escalation_routers(service: EscalationService, directory: Directory) -> list[Router]:
    """Return the routes over `service`: those of a tenant, and those of escalations."""

    @post("/")
    async def open_one(request: Request[Any, Any, Any]) -> Response[bytes]:
        by = require_scope(request, _WRITE)
        read_query(request, ())
        key = check_idempotency_key(request.headers.get("idempotency-key"))
        answer = await service.open(by, read_opening(await read_body(request, EscalationOpen)), key)
        return Response(answer.body, status_code=answer.status, media_type="application/json")

    @get("/")
    async def list_all(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_reader(request)
        page, query = read_page(request, {"state", "tenant"})
        tenant_id = _read_tenant(query.get("tenant"), by, directory)
        found = await service.list_all(by, tenant_id, read_state(query.get("state")), page.before, page.limit + 1)
        return build_list([{"id": key, "view": view} for key, view in found], page, lambda row: row["view"])

    @get("/report")
    async def report(request: Request[Any, Any, Any]) -> EscalationReport:
        by = require_platform(request)
        read_query(request, ())
        return await collect_report(service, by)

    @get("/{escalation:str}")
    async def show(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = require_reader(request)
        read_query(request, ())
        return await service.get(by, check_id(escalation))

    return [
        Router("/api/v1/tenants/{tenant:str}/escalations", route_handlers=[open_one]),
        Router("/api/v1/escalations", route_handlers=[list_all, report, show]),
        _build_judging_router(service),
        _build_serving_router(service),
    ]


async def collect_report(service: EscalationService, by: Identity) -> EscalationReport:
    """Return the report of all escalations that somebody may see."""
    found, before = [], None
    while page := await service.list_all(by, None, None, before, _REPORT_PAGE):
        found += [view for _, view in page]
        before = page[-1][0]
    return build_report(found)


def _build_judging_router(service: EscalationService) -> Router:
    """Return the verbs by which administrators say yes, no, and until when."""

    @post("/approve", status_code=200)
    async def approve(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation)
        return await service.approve(by, escalation, read_approval(await read_body(request, EscalationApprove)))

    @post("/reject", status_code=200)
    async def reject(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation)
        body = await read_body(request, EscalationReject)
        return await service.reject(by, escalation, check_reason(body.reason, "reason") or "")

    @post("/extend", status_code=200)
    async def extend(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation)
        body = await read_body(request, EscalationExtend)
        review_at = to_utc(body.review_at, "review_at")
        return await service.extend(by, escalation, review_at, check_reason(body.reason, "reason"))

    return Router("/api/v1/escalations/{escalation:str}", route_handlers=[approve, reject, extend])


def _build_serving_router(service: EscalationService) -> Router:
    """Return the verbs that change what is served."""

    @post("/register", status_code=200)
    async def register(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation)
        body = await read_body(request, EscalationRegister)
        wanted = Registration(pool=body.pool, digest=body.digest, cost_per_month=body.cost_per_month)
        return await service.register(by, escalation, wanted)

    @post("/activate", status_code=200)
    async def activate(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation)
        body = await _read_optional(request, EscalationActivate)
        return await service.activate(by, escalation, body.wait_s)

    @post("/revert", status_code=200)
    async def revert(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation, is_for_owners=True)
        return await service.revert(by, escalation, await _read_reason(request))

    @post("/close", status_code=200)
    async def close(request: Request[Any, Any, Any], escalation: FromPath[str]) -> WholeEscalationView:
        by = await enter(request, service, escalation, is_for_owners=True)
        return await service.close(by, escalation, await _read_reason(request))

    return Router("/api/v1/escalations/{escalation:str}", route_handlers=[register, activate, revert, close])


async def enter(
    request: Request[Any, Any, Any], service: EscalationService, escalation: str, *, is_for_owners: bool = False
) -> Identity:
    """Return who may move this escalation: administrators, and for some verbs its own team.

    Raises:
        NotFoundError: There is none that the caller may see.
        PermissionDeniedError: The caller may see it, and no more.
    """
    read_query(request, ())
    by = get_identity(request)
    await service.get(by, check_id(escalation))
    return require_scope(request, _WRITE) if is_for_owners else require_admin(request)


def require_reader(request: Request[Any, Any, Any]) -> Identity:
    """Platform keys see all; those of teams need the scope that also opens them, as there is no other."""
    identity = get_identity(request)
    if not identity.is_platform and not identity.has_scope(_WRITE):
        raise PermissionDeniedError(f"This key lacks the scope {_WRITE}")
    return identity


def check_id(text: str) -> str:
    """Return the id of an escalation.

    Raises:
        NotFoundError: No escalation has such an id.
    """
    if _ID.fullmatch(text) is None:
        # may hold what a database refuses to compare
        raise NotFoundError("There is no such escalation, or it is not yours.", param="escalation")
    return text


def read_opening(body: EscalationOpen) -> EscalationOpening:
    """Return what is asked for, its names and texts checked."""
    if not is_name(body.adapter):
        raise NotFoundError("There is no such adapter.", param="adapter")
    check_text(body.evidence.evaluation, "evidence.evaluation")
    check_text(body.evidence.metric, "evidence.metric")
    return EscalationOpening(
        adapter=body.adapter,
        version=body.version,
        evidence=body.evidence,
        reason=check_reason(body.reason, "reason"),
        expires_at=None if body.expires_at is None else to_utc(body.expires_at, "expires_at"),
    )


def read_approval(body: EscalationApprove) -> Approval:
    """Return what an administrator agrees to, its texts checked."""
    return Approval(
        owner=check_text(body.owner, "owner") or "",
        justification=check_reason(body.justification, "justification") or "",
        budget_per_month=body.budget_per_month,
        currency=body.currency,
        review_at=to_utc(body.review_at, "review_at"),
        on_overdue=body.on_overdue or "keep",
    )


async def _read_reason(request: Request[Any, Any, Any]) -> str | None:
    return check_reason((await _read_optional(request, EscalationReason)).reason, "reason")


async def _read_optional(request: Request[Any, Any, Any], into: type[_T]) -> _T:
    """Return a body that may be left out altogether."""
    return await read_body(request, into) if await request.body() else into()


def check_reason(text: str | None, param: str) -> str | None:
    """Return a reason that is fit to be shown and stored."""
    return check_text(text, param, _MAX_REASON_LEN)


def read_state(text: str | None) -> State | None:
    """Return the state that is asked for.

    Raises:
        InvalidRequestError: There is no such state.
    """
    states = get_args(State)
    if text is not None and text not in states:
        raise InvalidRequestError(f"state is one of {', '.join(states)}", param="state")
    return cast("State | None", text)


def _read_tenant(name: str | None, by: Identity, directory: Directory) -> str | None:
    if name is None:
        return None
    aimed = target(by, name, directory)
    if aimed is None:
        raise NotFoundError("There is no such tenant, or it is not yours.", param="tenant")
    return aimed.target_tenant_id
