"""The routes of an engine: OpenAI's, the internal ones, health and metrics. Each is one step into `Front`."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import HttpMethod, Litestar, Request, Response, Router, delete, get, post, put, route
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath
from litestar.types import ASGIApp

from loraplex_engine.errors import (
    EmbeddingsNotServedError,
    InvalidRequestError,
    InvalidTokenError,
    ModelNotFoundError,
    NotFoundError,
    NotReadyError,
    UseChatCompletionsError,
)
from loraplex_engine.server.call import read_caller, read_json
from loraplex_engine.server.field.convert import refuse
from loraplex_engine.server.front import Front, build_state
from loraplex_engine.server.guard import build_guard, read_identity
from loraplex_engine.server.hook import HOOK_ROUTES
from loraplex_engine.server.http_error import handle_exception
from loraplex_engine.server.preparation import prepare
from loraplex_engine.server.request_log import KEPT_S
from loraplex_engine.wire.done import BASE_DIGEST, DIGEST, RequestStatus, UsageReport
from loraplex_engine.wire.messages import DropAdapter, GetMetrics, GetState, LoadAdapter
from loraplex_engine.wire.openai import ModelCard, ModelList, TokenizeResponse
from loraplex_registry.wire.digest import check_digest
from loraplex_registry.wire.identity import TokenVerifier

CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 65.0
DRAIN_TIMEOUT_S = 30.0


@post("/v1/chat/completions", status_code=200)
async def create_chat(request: Request[Any, Any, State], front: NamedDependency[Front]) -> ASGIApp:
    """Answer a chat."""
    caller = read_caller(request.headers, request.state.identity)
    return await prepare(request, caller, front.create_chat(await read_json(request), caller))


@post("/v1/completions", status_code=200)
async def create_completion(request: Request[Any, Any, State], front: NamedDependency[Front]) -> ASGIApp:
    """Continue a prompt."""
    caller = read_caller(request.headers, request.state.identity)
    return await prepare(request, caller, front.create_completion(await read_json(request), caller))


@post("/v1/tokenize", status_code=200)
async def tokenize(request: Request[Any, Any, State], front: NamedDependency[Front]) -> Response[TokenizeResponse]:
    """Return the ids of a prompt."""
    caller = read_caller(request.headers, request.state.identity)
    tokens, digest = await prepare(request, caller, front.tokenize(await read_json(request), caller))
    return Response(tokens, headers={DIGEST: digest or BASE_DIGEST})


@get("/v1/models")
async def list_models(front: NamedDependency[Front]) -> ModelList:
    """List the base."""
    return ModelList(front.models())


@get("/v1/models/{model:path}")
async def get_model(model: FromPath[str], front: NamedDependency[Front]) -> ModelCard:
    """Show the base."""
    for card in front.models():
        if card.id == model.removeprefix("/"):
            return card
    raise ModelNotFoundError(param="model")


@put("/internal/adapters/{digest:str}")
async def load_adapter(
    request: Request[Any, Any, State], digest: FromPath[str], front: NamedDependency[Front]
) -> dict[str, Any]:
    """Make an adapter resident and wait for it."""
    given = await read_json(request)
    try:
        options = msgspec.convert(given, LoadOptions)
    except msgspec.ValidationError as error:
        raise refuse(error, given, LoadOptions) from error
    body = await front.core.call(
        LoadAdapter, LOAD_TIMEOUT_S, digest=_check(digest), pin=options.pin, forgive=options.forgive
    )
    return {"digest": digest, "pin": options.pin, **(body if isinstance(body, dict) else {})}


@delete("/internal/adapters/{digest:str}")
async def drop_adapter(digest: FromPath[str], front: NamedDependency[Front]) -> None:
    """Drain an adapter's requests and free its slot."""
    await front.core.call(DropAdapter, LOAD_TIMEOUT_S, digest=_check(digest))


@post("/internal/parity/{digest:str}", status_code=200)
async def measure_parity(
    request: Request[Any, Any, State], digest: FromPath[str], front: NamedDependency[Front]
) -> dict[str, Any]:
    """Compare an adapter in its slot with the base and its merged deltas in float32."""
    caller = read_caller(request.headers, request.state.identity)
    await request.body()
    return await prepare(request, caller, front.measure_parity(_check(digest)))


@get("/internal/state")
async def show_state(front: NamedDependency[Front]) -> dict[str, Any]:
    """Show slots, tiers, queue, KV and model facts."""
    state = await front.core.call(GetState, CALL_TIMEOUT_S) if front.core.is_ready else None
    return build_state(front, state if isinstance(state, dict) else None)


@post("/internal/requests/{request_id:str}/abort", status_code=200)
async def abort_request(request_id: FromPath[str], front: NamedDependency[Front]) -> Response[Any]:
    """End a request and return what it cost, also of one that has ended."""
    generation = front.log.find_open(request_id)
    if generation is not None:
        generation.cancel("The request was aborted.")
        return Response(await generation.settle())
    return Response(_find(front, request_id).done)


@get("/internal/requests/{request_id:str}")
async def show_request(request_id: FromPath[str], front: NamedDependency[Front]) -> RequestStatus:
    """Show a running request's progress or a finished one's cost."""
    return _find(front, request_id)


@get("/internal/usage")
async def show_usage(request: Request[Any, Any, State], front: NamedDependency[Front]) -> UsageReport:
    """Show what all requests of this process cost, and each of those that ended in the last `within_s` seconds."""
    return front.log.report(_read_within(request.query_params.get("within_s", "0")))


@post("/internal/drain")
async def drain(front: NamedDependency[Front]) -> Response[Any]:
    """Refuse new requests and wait for the open ones: 200 when none is left, 202 while there are."""
    num_open = await front.drain(DRAIN_TIMEOUT_S)
    return Response({"open_requests": num_open}, status_code=202 if num_open else 200)


@get("/healthz")
async def show_health() -> dict[str, str]:
    """Say that the process is alive."""
    return {"status": "alive"}


@get("/readyz")
async def show_readiness(
    request: Request[Any, Any, State], front: NamedDependency[Front], state: State
) -> dict[str, Any]:
    """Say to anyone whether requests are taken now; who has an identity hears of what, and if it is open for tests."""
    facts = front.core.get_facts()
    try:
        read_identity(state["verifier"], request.headers.get("authorization", ""))
    except InvalidTokenError:
        return {"status": "serving"}
    return {"status": "serving", "model": facts.name} | ({"test_hooks": True} if state["has_test_hooks"] else {})


@get("/metrics")
async def show_metrics(front: NamedDependency[Front]) -> Response[bytes]:
    """Return the core's metrics and the front's."""
    try:
        core = await front.core.call(GetMetrics, CALL_TIMEOUT_S)
    except NotReadyError:
        core = b""
    text = (core if isinstance(core, bytes) else b"") + front.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class LoadOptions(msgspec.Struct):
    """Body of PUT /internal/adapters/{digest}; what a newer gateway says beside it is passed over.

    Without `pin` the adapter stays pinned or not, as it was. Failed loads and strikes are forgotten unless `forgive` is
    False, for callers that ask again and again.
    """

    pin: bool | None = None
    forgive: bool = True


def _check(digest: str) -> str:
    try:
        return check_digest(digest)
    except ValueError as error:
        raise InvalidRequestError(f"{error}.", param="digest") from error


def _read_within(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= KEPT_S:
        raise InvalidRequestError(f"within_s must be a number of seconds from 0 to {KEPT_S:.0f}.", param="within_s")
    return seconds


def _find(front: Front, request_id: str) -> RequestStatus:
    status = front.log.find(request_id)
    if status is None:
        raise NotFoundError("No request with this id runs here or ended in the last 15 minutes.")
    return status


_ANY = [HttpMethod.GET, HttpMethod.POST, HttpMethod.DELETE]


@route("/v1/embeddings", http_method=_ANY)
async def refuse_embeddings() -> None:
    """Say that the bases generate text."""
    raise EmbeddingsNotServedError


@route(["/v1/responses", "/v1/responses/{rest:path}"], http_method=_ANY)
async def refuse_responses() -> None:
    """Say what to use instead."""
    raise UseChatCompletionsError


_OPENAI_ROUTES = (
    create_chat,
    create_completion,
    tokenize,
    list_models,
    get_model,
    refuse_embeddings,
    refuse_responses,
)
_INTERNAL_ROUTES = (
    load_adapter,
    drop_adapter,
    measure_parity,
    show_state,
    abort_request,
    show_request,
    show_usage,
    drain,
    show_metrics,
)


def build_app(front: Front, verifier: TokenVerifier, *, has_test_hooks: bool = False) -> Litestar:
    """Return the app: all but the probes behind the token guard, and routes for tests only if asked for."""
    guarded = Router(
        "/",
        route_handlers=[*_OPENAI_ROUTES, *_INTERNAL_ROUTES, *(HOOK_ROUTES if has_test_hooks else ())],
        guards=[build_guard(verifier)],
    )
    return Litestar(
        [guarded, show_health, show_readiness],
        dependencies={"front": Provide(lambda: front, sync_to_thread=False)},
        exception_handlers={Exception: handle_exception},
        state=State({"metrics": front.metrics, "has_test_hooks": has_test_hooks, "verifier": verifier}),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
    )
