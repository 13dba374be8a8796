"""Routes for tests, present only with LORAPLEX_TEST_HOOKS=1: they reach past the checks at the front doors."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency

from loraplex_engine.server.call import read_json
from loraplex_engine.server.field.convert import refuse
from loraplex_engine.server.front import Front
from loraplex_engine.wire.messages import BindFolder, KillRequest, PoisonFree, SpoilSlot

_TIMEOUT_S = 60.0
B = TypeVar("B")


class BindBody(msgspec.Struct, forbid_unknown_fields=True):
    """`path`: the PEFT folder, as the engine's machine sees it."""

    path: str


class PoisonBody(msgspec.Struct, forbid_unknown_fields=True):
    """No fields."""


class KillBody(msgspec.Struct, forbid_unknown_fields=True):
    """`id`: the request's, which may come later; it fails once it has `after_tokens` tokens."""

    id: str
    after_tokens: int


class SpoilBody(msgspec.Struct, forbid_unknown_fields=True):
    """`digest`: of an adapter that is loaded."""

    digest: str


@post("/internal/test/bind", status_code=200)
async def bind_folder(request: Request[Any, Any, State], front: NamedDependency[Front]) -> dict[str, Any]:
    """Make a folder of this machine loadable by the digest that is answered."""
    body = await _read(request, BindBody)
    return _found(await front.core.call(BindFolder, _TIMEOUT_S, path=body.path))


@post("/internal/test/poison", status_code=200)
async def poison_free(request: Request[Any, Any, State], front: NamedDependency[Front]) -> dict[str, Any]:
    """Overwrite what nobody uses with NaN and say how much that was."""
    await _read(request, PoisonBody)
    return _found(await front.core.call(PoisonFree, _TIMEOUT_S))


@post("/internal/test/kill_request", status_code=200)
async def kill_request(request: Request[Any, Any, State], front: NamedDependency[Front]) -> dict[str, Any]:
    """Let one request fail in the middle of its answer."""
    body = await _read(request, KillBody)
    call = front.core.call(KillRequest, _TIMEOUT_S, request_id=body.id, after_tokens=body.after_tokens)
    return _found(await call)


@post("/internal/test/spoil", status_code=200)
async def spoil_slot(request: Request[Any, Any, State], front: NamedDependency[Front]) -> dict[str, Any]:
    """Put other numbers where a loaded adapter's lie."""
    body = await _read(request, SpoilBody)
    return _found(await front.core.call(SpoilSlot, _TIMEOUT_S, digest=body.digest))


HOOK_ROUTES = (bind_folder, poison_free, kill_request, spoil_slot)


async def _read(request: Request[Any, Any, State], kind: type[B]) -> B:
    given = await read_json(request)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise refuse(error, given, kind) from error


def _found(body: dict[str, Any] | bytes | None) -> dict[str, Any]:
    return body if isinstance(body, dict) else {}
