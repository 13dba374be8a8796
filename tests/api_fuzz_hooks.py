"""Hooks of schemathesis: requests name things that exist, and valid ones obey what a schema cannot say.

LORAPLEX_TEST_FUZZ_NAMES holds, as JSON, the names of what exists, by parameter. Every other request gets them for its
own, or, where it uses up what it names, things of the stock. What all others need is spared. Each call's operation and
status go to the file LORAPLEX_TEST_FUZZ_LOG.
"""

from __future__ import annotations

import itertools
import json
import os
import unicodedata
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.parameters import ParameterLocation

from api_fuzz_stock import Given, Stock

_NAMES: dict[str, Any] = json.loads(os.environ["LORAPLEX_TEST_FUZZ_NAMES"])
_KEPT_KEYS: list[str] = json.loads(os.environ["LORAPLEX_TEST_FUZZ_KEPT_KEYS"])
_LOG = Path(os.environ["LORAPLEX_TEST_FUZZ_LOG"]).open("a", buffering=1)  # noqa: SIM115 - until the process ends
_STOCK = Stock(**json.loads(os.environ["LORAPLEX_TEST_FUZZ_STOCK"]))
_CHANGES_ADAPTER = {"changeAdapter", "deleteAdapter", "retireVersion", "quarantineVersion"}
"""They would end what other calls need; what else changes the named adapter does not."""
_MAX_TEXT_LEN = 200
_turns = itertools.count()


def _is_shown(text: str) -> bool:
    return bool(text.strip()) and len(text) <= _MAX_TEXT_LEN and text.isprintable()


_characters = st.characters(codec="utf-8", categories=("L", "N", "P", "S"))
_shown = st.text(_characters, min_size=1, max_size=20).map(lambda text: unicodedata.normalize("NFC", text))
schemathesis.openapi.format("shown-text", _shown.filter(_is_shown))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Mend one request in place."""
    is_positive = case.meta is not None and case.meta.generation.mode.is_positive
    # steps of a story use what earlier ones have made
    may_be_named = not _is_story(case) and not _is_wrong_at(case, ParameterLocation.PATH)
    given = _STOCK.give(_name_of(case)) if is_positive and may_be_named else None
    if given is not None or (may_be_named and next(_turns) % 2):
        _use_names(case)
    if "x-request-timeout" in (case.headers or {}):
        case.headers["x-request-timeout"] = _enough(case.headers["x-request-timeout"])
    if is_positive:
        _obey(case)
    if given is None:
        _spare(case)
    else:
        _use(given, case, kwargs)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Note what came of it."""
    _LOG.write(f"{_name_of(case)} {response.status_code}\n")


def _enough(timeout: str) -> str:
    """A time that is one, but too short for anything, only ever meets its own end."""
    try:
        return "60" if 0 < float(timeout) < 60 else timeout
    except ValueError:
        return timeout


def _use_names(case: Any) -> None:
    path = case.path_parameters or {}
    path.update({name: value for name, value in _NAMES.items() if name in path})
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = _NAMES["model"]


def _use(given: Given, case: Any, kwargs: Any) -> None:
    """Let a call have what it needs to succeed."""
    if given.path:
        case.path_parameters.update(given.path)
    if given.headers:
        case.headers.update(given.headers)
    if given.body and isinstance(case.body, dict):
        case.body.update(given.body)
    kwargs.update(given.sent)


def _spare(case: Any) -> None:
    """Leave alive what everything else needs: schemathesis also sends names that it has read in answers."""
    path = case.path_parameters or {}
    if path.get("tenant") != _NAMES["tenant"]:
        return
    name = _name_of(case)
    if name == "changeTenant" and isinstance(case.body, dict):
        for field in ("limits", "bases", "state", "weight"):
            case.body.pop(field, None)
    if (
        name == "deleteTenant"
        or path.get("key_id") in _KEPT_KEYS
        or (name in _CHANGES_ADAPTER and path.get("adapter") == _NAMES["adapter"])
        or (name == "deleteAlias" and path.get("alias") == _NAMES["alias"])
    ):
        path["tenant"] = "gone"


def _name_of(case: Any) -> str:
    name: str = case.operation.definition.raw["operationId"]
    return name


def _is_wrong_at(case: Any, place: ParameterLocation) -> bool:
    return case.meta is not None and case.meta.is_negative_at(place)


def _is_story(case: Any) -> bool:
    return case.meta is not None and case.meta.phase.name.value == "stateful"


def _obey(case: Any) -> None:
    """A cursor is one that a list gave, weights sum to 100, bases, models and cards exist, keys expire in future."""
    (case.query or {}).pop("cursor", None)
    if "Idempotency-Key" in (case.headers or {}):
        # the same one for other content is refused
        case.headers["Idempotency-Key"] = f"key-{os.getpid()}-{next(_turns)}"
    if _name_of(case) == "moveAlias" and len(case.headers or {}) > 0:
        case.headers.pop("If-None-Match", None)
    if not isinstance(case.body, dict):
        return
    for name, value in (
        ("targets", [{"version": 1, "weight": 100}]),
        ("bases", []),
        ("matrix_hashes", {}),
        ("expires_at", "2999-01-01T00:00:00Z"),
    ):
        if name in case.body:
            case.body[name] = value
    if _name_of(case) == "planMemory":
        case.body |= {"model": "llama-3.1-8b", "config": None, "gpu": "24GiB"}
    _obey_escalations(case.body, case.path_parameters or {})
    case.body.update({name: _to_whole(value) for name, value in case.body.items()})


def _obey_escalations(body: dict[str, Any], path: dict[str, Any]) -> None:
    """Evidence shows a gap, reviews follow each other within a year, amounts have two decimals, no pool is there."""
    if "evidence" in body:
        body |= {"adapter": _NAMES["adapter"], "version": None, "expires_at": None}
        body["evidence"] |= {"base": 1, "lora": 2, "target": 3, "ranks_tried": [{"rank": 8, "value": 2}]}
    if "review_at" in body:
        body["review_at"] = (datetime.now(UTC) + timedelta(days=300 + next(_turns) / 1000)).isoformat()
    for name in ("budget_per_month", "cost_per_month"):
        if body.get(name) is not None:
            body[name] = int(body[name])
    if "pool" in body:
        path["escalation"] = "esc_" + "a" * 26


def _to_whole(value: Any) -> Any:
    """Numbers without a fraction are written without one: 5, not 5.0, which is the same to a schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _to_whole(each) for name, each in value.items()}
    return [_to_whole(each) for each in value] if isinstance(value, list) else value
