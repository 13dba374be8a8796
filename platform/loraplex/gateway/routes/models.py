"""/v1/models: what the caller may name, as the OpenAI API lists it."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from litestar import Request, Router, get

from loraplex.errors import ModelNotFoundError
from loraplex.gateway.inference import Inference, check_may_infer
from loraplex.gateway.names import NameIndex
from loraplex.gateway.permission import get_identity
from loraplex.gateway.resolution import Caller, Resolved, find_listed, resolve
from loraplex_registry.wire.adapter import AdapterName

_PREFIX = "/v1/models/"
_PLATFORM = "platform"


def build_model_router(names: NameIndex, inference: Inference, started_at: int) -> Router:
    """Return the routes; `started_at` (Unix seconds) stands for `created`, which names do not carry."""

    @get("/v1/models")
    async def list_all(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = get_identity(request)
        check_may_infer(identity)
        await names.ensure_fresh()
        cards = list_cards(names, inference.build_caller(identity), started_at)
        return {"object": "list", "data": cards}

    @get("/v1/models/{model:path}")
    async def show(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = get_identity(request)
        check_may_infer(identity)
        await names.ensure_fresh()
        model = _read_model(request)
        resolved = resolve(model, inference.build_caller(identity), names, identity.key_id)
        return _show_resolved(model, resolved, started_at)

    return Router("/", route_handlers=[list_all, show])


def list_cards(names: NameIndex, caller: Caller, started_at: int) -> list[dict[str, Any]]:
    """Bases first, then one entry per adapter of which a live version is ready, by the shortest name that calls it."""
    bases = [base for base in names.bases() if caller.bases is None or base.name in caller.bases]
    adapters = names.adapters(None if caller.tenant is None else (caller.tenant,))
    return [
        *(_show_base(base.name, started_at) for base in bases),
        *(card for adapter in adapters if (card := _show_adapter(adapter, started_at)) is not None),
    ]


def _show_adapter(adapter: AdapterName, started_at: int) -> dict[str, Any] | None:
    version = find_listed(adapter)
    if version is None:
        return None
    name = adapter.tenant if adapter.is_default else f"{adapter.tenant}/{adapter.name}"
    return _show_resolved(name, Resolved(adapter.base, adapter, version), started_at)


def _show_resolved(name: str, resolved: Resolved, started_at: int) -> dict[str, Any]:
    if resolved.adapter is None:
        return _show_base(name, started_at)
    return {
        "id": name,
        "object": "model",
        "created": started_at,
        "owned_by": resolved.adapter.tenant,
        "root": resolved.full_name,
        "parent": resolved.base,
    }


def _show_base(name: str, started_at: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": started_at,
        "owned_by": _PLATFORM,
        "root": name,
        "parent": None,
    }


def _read_model(request: Request[Any, Any, Any]) -> str:
    """The name exactly as sent, `/`, `@` and `:` raw or %-encoded: the router's own form has slashes tidied."""
    raw: bytes = request.scope.get("raw_path") or b""
    try:
        return unquote(raw.partition(b"?")[0].decode("ascii").removeprefix(_PREFIX), errors="strict")
    except UnicodeDecodeError as error:
        raise ModelNotFoundError(param="model") from error
