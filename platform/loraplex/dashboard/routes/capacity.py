"""Planning before anything is bought, and advice from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Request, Response, get

from loraplex.advise.finding import Finding
from loraplex.dashboard.memo import Memo
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.errors import InvalidRequestError, LoraplexError
from loraplex.gateway.body import convert
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_scope
from loraplex.plan.adapter import AdapterGroup
from loraplex.plan.card import CARD_TO_MIB
from loraplex.plan.explain import show_size
from loraplex.plan.figures import Plan
from loraplex.plan.planner import build_plan
from loraplex.plan.preset import PRESETS, find_preset
from loraplex.plan.spec import PlanSpec

_FORTY = {"model": "llama-3.1-8b", "gpu": "h100-80g", "count": "40", "rank": "16", "modules": "attention"}
_USAGE = "usage:read"
_ADVICE_FRESH_S = 60.0
_NUMBERS = ("max_model_len", "max_num_seqs", "max_loras")
_CHOICES = ("model", "gpu", "dtype", "kv_cache_dtype")
_FIELDS = (*_CHOICES, *_NUMBERS, "count", "rank", "modules")
_PARAM_TO_FIELD = {"adapters": "count"}
_MODULES = (
    ("attention", "Attention: q, k, v, o"),
    ("mlp", "MLP: gate, up, down"),
    ("all", "All of both"),
    ("q v", "q and v, PEFT's default"),
)


def build_capacity(desk: Desk) -> Section:
    """Return both pages."""

    @get("/ui/plan")
    async def show_plan(request: Request[Any, Any, Any]) -> Response[str]:
        query = read_query(request, _FIELDS)
        asked = {name: value for name, value in (query or _FORTY).items() if value}
        plan: Plan | None = None
        problem: LoraplexError | None = None
        try:
            plan = build_plan(_read_spec(asked))
        except LoraplexError as error:
            problem = error
        return desk.pages.show(
            request,
            "plan.html",
            200 if problem is None else 400,
            asked=asked,
            plan=plan,
            problem=problem,
            wrong=_find_field(problem),
            presets=PRESETS,
            cards=CARD_TO_MIB,
            modules=_MODULES,
            show_size=show_size,
        )

    entries = [Entry("/ui/plan", "Plan"), Entry("/ui/advice", "Advice", scope=_USAGE)]
    return Section(entries=entries, handlers=[show_plan, *_build_advice(desk)])


def _build_advice(desk: Desk) -> list[Any]:
    advising = desk.parts.advising
    memo: Memo[str | None, list[Finding]] = Memo(_ADVICE_FRESH_S)

    @get("/ui/advice")
    async def show_advice(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, _USAGE)
        read_query(request, ())
        found = await advising.advise(None if identity.is_platform else identity.tenant_id)
        return desk.pages.show(request, "advice.html", findings=found)

    @get("/ui/part/advice")
    async def show_summary(request: Request[Any, Any, Any]) -> Response[str]:
        """What the overview asks for once it is seen: a week of calls is looked at, which takes a moment."""
        identity = require_scope(request, _USAGE)
        read_query(request, ())
        tenant_id = None if identity.is_platform else identity.tenant_id
        found = await memo.get(tenant_id, lambda: advising.advise(tenant_id))
        text = desk.pages.render("_advice.html", findings=[one for one in found if one.state == "advice"])
        return Response(text, media_type="text/html", headers={"cache-control": "no-store"})

    return [show_advice, show_summary]


def _find_field(problem: LoraplexError | None) -> str | None:
    """Return the field of the form that a refusal is about, if it is about one."""
    param = (problem.param if problem else None) or ""
    name = _PARAM_TO_FIELD.get(param, param.rpartition(".")[2])
    return name if name in _FIELDS else None


def _read_spec(asked: Mapping[str, str]) -> PlanSpec:
    """Return the question of a form; a field that is empty is as if it were not there."""
    if "model" in asked and find_preset(asked["model"]) is None:
        raise InvalidRequestError(
            "There is no such preset; choose one of the list. loraplex plan takes the config.json of any other model.",
            param="model",
        )
    fields: dict[str, Any] = {name: asked[name] for name in _CHOICES if name in asked}
    fields |= {name: _read_count(asked, name) for name in _NUMBERS if name in asked}
    if "count" in asked:
        group = AdapterGroup(
            count=_read_count(asked, "count"),
            rank=_read_count(asked, "rank") if "rank" in asked else 16,
            modules=asked.get("modules", "attention").split(),
        )
        fields["adapters"] = (group,)
    return convert(fields, PlanSpec)


def _read_count(asked: Mapping[str, str], name: str) -> int:
    text = asked[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidRequestError(f"{name} is a whole number", param=name)
    return int(text)
