"""The operations on escalations, their types, and what types cannot say of their fields."""

from __future__ import annotations

from typing import get_args

import msgspec

from loraplex.escalations.evidence import MAX_RANKS, Evidence
from loraplex.escalations.machine import State
from loraplex.escalations.record import EscalationView, WholeEscalationView
from loraplex.escalations.report import EscalationReport
from loraplex.gateway.routes.escalations import (
    EscalationActivate,
    EscalationApprove,
    EscalationExtend,
    EscalationOpen,
    EscalationReason,
    EscalationRegister,
    EscalationReject,
)
from loraplex.openapi.operation import Answer, Body, Operation, Parameter
from loraplex.openapi.parameter import IDEMPOTENCY_KEY, OF_TENANT, PAGE, TENANT
from loraplex.openapi.schema import NAME, TEXT, TIME, Schema, list_of, ref

_ALL = "/api/v1/escalations"
_ONE = Parameter("escalation", "path", {"type": "string", "pattern": "^esc_[a-z2-7]{26}$"})
_STATE = Parameter("state", "query", {"enum": list(get_args(State))}, "Only those in this state, as of now")
_LONG: Schema = TEXT | {"maxLength": 2000}
_AMOUNT: Schema = {"minimum": 0, "maximum": 10**12}
_DIGEST: Schema = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
_NUMBER: Schema = {"minimum": -(10**15), "maximum": 10**15}
_CURRENCY: Schema = {"pattern": "^[A-Z]{3}$"}
_DATES: dict[str, Schema] = {
    "state": {"enum": list(get_args(State))},
    "created_at": TIME,
    "expires_at": TIME,
    "review_at": TIME,
}


def _verb(
    verb: str, body: str, summary: str, codes: tuple[str, ...] = ("conflict",), *, is_required: bool = True
) -> Operation:
    return Operation(
        method="post",
        path=f"{_ALL}/{{escalation}}/{verb}",
        name=f"{verb}Escalation",
        tag="escalations",
        summary=summary,
        answers=(Answer(200, "The escalation as it is now", ref("WholeEscalationView")),),
        codes=codes,
        parameters=(_ONE,),
        body=Body(ref(body), is_required=is_required),
    )


ESCALATION: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/api/v1/tenants/{tenant}/escalations",
        name="openEscalation",
        tag="escalations",
        summary="Ask for a full fine-tune, with evidence that the LoRA falls short",
        answers=(Answer(201, "The new escalation, with the platform's own figures", ref("WholeEscalationView")),),
        codes=("conflict", "idempotency_key_reused", "adapter_retired", "store_unavailable"),
        parameters=(TENANT, IDEMPOTENCY_KEY),
        body=Body(ref("EscalationOpen")),
    ),
    Operation(
        method="get",
        path=_ALL,
        name="listEscalations",
        tag="escalations",
        summary="List escalations: all for platform keys, else the key's own tenant's",
        answers=(Answer(200, "One page, newest first", list_of("EscalationView")),),
        codes=("not_found",),
        parameters=(_STATE, OF_TENANT, *PAGE),
    ),
    Operation(
        method="get",
        path=f"{_ALL}/report",
        name="reportEscalations",
        tag="escalations",
        summary="Report all escalations, what they cost, and what forty would; for platform keys",
        answers=(Answer(200, "The report", ref("EscalationReport")),),
    ),
    Operation(
        method="get",
        path=f"{_ALL}/{{escalation}}",
        name="showEscalation",
        tag="escalations",
        summary="Show an escalation with evidence, figures and history",
        answers=(Answer(200, "The escalation", ref("WholeEscalationView")),),
        parameters=(_ONE,),
    ),
    _verb("approve", "EscalationApprove", "Approve it; for admins who did not ask for it"),
    _verb("reject", "EscalationReject", "Reject it; for admins"),
    _verb("register", "EscalationRegister", "Bind the full fine-tune that a pool serves; for admins"),
    _verb(
        "activate",
        "EscalationActivate",
        "Let the adapter's name mean the full fine-tune, once its pool is ready; for admins",
        ("conflict", "no_replica", "adapter_quarantined"),
        is_required=False,
    ),
    _verb("revert", "EscalationReason", "Let the name mean again what it meant before", is_required=False),
    _verb("extend", "EscalationExtend", "Move the review date; for admins"),
    _verb("close", "EscalationReason", "End it; one that is active is reverted first", is_required=False),
)

ESCALATION_MESSAGES: tuple[type[msgspec.Struct], ...] = (
    EscalationActivate,
    EscalationApprove,
    EscalationExtend,
    EscalationOpen,
    EscalationReason,
    EscalationRegister,
    EscalationReject,
    EscalationReport,
    EscalationView,
    Evidence,
    WholeEscalationView,
)

ESCALATION_REFINED: dict[str, dict[str, Schema]] = {
    "ApprovalView": {"review_at": TIME, "approved_at": TIME},
    "EscalationApprove": {
        "owner": TEXT,
        "justification": _LONG,
        "budget_per_month": _AMOUNT,
        "review_at": TIME,
        "currency": _CURRENCY,
    },
    "EscalationExtend": {"review_at": TIME, "reason": _LONG},
    "EscalationOpen": {"adapter": NAME, "reason": _LONG, "expires_at": TIME},
    "EscalationReason": {"reason": _LONG},
    "EscalationRegister": {"pool": NAME, "digest": _DIGEST, "cost_per_month": _AMOUNT},
    "EscalationReject": {"reason": _LONG},
    "EscalationView": _DATES,
    "Evidence": {
        "evaluation": TEXT,
        "data_digest": _DIGEST,
        "metric": TEXT,
        "base": _NUMBER,
        "lora": _NUMBER,
        "target": _NUMBER,
        "ranks_tried": {"minItems": 1, "maxItems": MAX_RANKS},
    },
    "RankTried": {"value": _NUMBER},
    "StepView": {"at": TIME},
    "WholeEscalationView": _DATES,
}
