"""The operation of the planner, and what it takes and answers."""

from __future__ import annotations

import msgspec

from loraplex.openapi.operation import Answer, Body, Operation
from loraplex.openapi.schema import TEXT, Schema, ref
from loraplex.plan.adapter import MAX_COUNT, MAX_MODULES, MAX_PARAMETERS, MAX_RANK, MODULE_NAMES
from loraplex.plan.figures import Plan
from loraplex.plan.spec import MAX_GROUPS, RANGES, PlanSpec

PLAN_MESSAGES: tuple[type[msgspec.Struct], ...] = (PlanSpec, Plan)

PLAN_REFINED: dict[str, dict[str, Schema]] = {
    "PlanSpec": {name: {"minimum": low, "maximum": high} for name, low, high in RANGES}
    | {
        "model": TEXT,
        "gpu": {"minLength": 1, "maxLength": 40},
        "adapters": {"maxItems": MAX_GROUPS},
        "config": {"description": "The content of a config.json; then model is what it is called."},
    },
    "AdapterGroup": {
        "count": {"minimum": 1, "maximum": MAX_COUNT},
        "rank": {"minimum": 1, "maximum": MAX_RANK},
        "modules": {"minItems": 1, "maxItems": MAX_MODULES, "items": {"enum": list(MODULE_NAMES)}},
        "num_parameters": {"minimum": 1, "maximum": MAX_PARAMETERS},
    },
}

PLAN: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/api/v1/plan",
        name="planMemory",
        tag="reports",
        summary="Say what a model and its adapters need on a card",
        answers=(Answer(200, "The figures, and the formulas behind them", ref("Plan")),),
        body=Body(ref("PlanSpec")),
    ),
)
