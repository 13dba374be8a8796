"""Reads what an upload asks for from its request, before the body."""

from __future__ import annotations

import re
from typing import Any, cast

from litestar import Request

from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.api.reading import check_plain, read_flag, read_query
from loraplex_registry.api.service import Services
from loraplex_registry.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    PermissionDeniedError,
    UnsupportedMediaTypeError,
    UnsupportedParameterError,
)
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.order import Promote, UploadOrder, UploadResult
from loraplex_registry.wire.identity import Identity

_PROMOTE = ("auto", "always", "never")
_MAX_WAIT_S = 600
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def build_order(
    request: Request[Any, Any, Any], tenant: TenantRef, adapter: str, caller: Identity, settings: RegistrySettings
) -> UploadOrder:
    """Return the order of an upload.

    Raises:
        InvalidRequestError: A parameter or header is not valid.
        PermissionDeniedError: `?base=` from someone who is no admin.
    """
    query = read_query(request, "promote", "dry_run", "wait", "base")
    wait_s = read_wait_s(query, settings.check_timeout_s)
    return _build(request, query, tenant, adapter, caller, wait_s)


async def take_upload(
    request: Request[Any, Any, Any], services: Services, tenant: TenantRef, adapter: str, caller: Identity
) -> UploadResult:
    """Read an upload in one body from its request and admit it; scope and tenant are judged already.

    Raises:
        AdapterRejectedError: It cannot be served exactly; carries the report.
        RegistryError: The request is at fault, or the registry is not able; nothing was stored.
    """
    order = build_order(request, tenant, adapter, caller, services.settings)
    length = read_length(request, services.settings)
    return await services.uploads.upload(order, request.stream(), read_boundary(request), length)


def build_large_order(
    request: Request[Any, Any, Any], tenant: TenantRef, adapter: str, caller: Identity
) -> UploadOrder:
    """Return the order that begins an upload in parts; how long to wait is said when it is complete.

    Raises:
        InvalidRequestError: A parameter or header is not valid.
        PermissionDeniedError: `?base=` from someone who is no admin.
    """
    return _build(request, read_query(request, "promote", "dry_run", "base"), tenant, adapter, caller, 0.0)


def _build(
    request: Request[Any, Any, Any],
    query: dict[str, str],
    tenant: TenantRef,
    adapter: str,
    caller: Identity,
    wait_s: float,
) -> UploadOrder:
    if "base" in query and not caller.is_admin:
        raise PermissionDeniedError("Only an admin may force a base", param="base")
    return UploadOrder(
        tenant=tenant,
        adapter=adapter,
        by=caller,
        promote=_read_promote(query),
        is_dry_run=read_flag(query, "dry_run"),
        base=query.get("base"),
        wait_s=wait_s,
        idempotency_key=read_idempotency_key(request),
    )


def read_length(request: Request[Any, Any, Any], settings: RegistrySettings) -> int:
    """Return the announced length of a multipart body in bytes, 0 if there is none.

    Raises:
        PayloadTooLargeError: It is too large.
    """
    text = request.headers.get("content-length", "0")
    length = int(text) if text.isascii() and text.isdigit() else 0
    if length > settings.max_upload_bytes:
        raise PayloadTooLargeError(
            f"The body is larger than {settings.max_upload_bytes >> 20} MiB; send larger adapters in parts, "
            "by POST .../uploads"
        )
    return length


def _read_promote(query: dict[str, str]) -> Promote:
    promote = query.get("promote", "auto")
    if promote not in _PROMOTE:
        raise InvalidRequestError("promote is auto, always or never", param="promote")
    return cast("Promote", promote)


def read_wait_s(query: dict[str, str], default_s: float) -> float:
    """Return how long the verdict may take, in seconds.

    Raises:
        UnsupportedParameterError: It is no whole number from 1 to 600.
    """
    text = query.get("wait")
    if text is None:
        return default_s
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MAX_WAIT_S):
        raise UnsupportedParameterError(
            f"wait is 1 to {_MAX_WAIT_S} seconds: an upload is judged before it is answered", param="wait"
        )
    return float(text)


def read_boundary(request: Request[Any, Any, Any]) -> str:
    """Return the boundary of the parts of a multipart body.

    Raises:
        UnsupportedMediaTypeError: The body is not multipart/form-data, or it is encoded.
        InvalidRequestError: There is no boundary.
    """
    kind, parameters = request.content_type
    if kind != "multipart/form-data":
        raise UnsupportedMediaTypeError("Send multipart/form-data, one part `files` per file")
    check_plain(request)
    boundary = parameters.get("boundary", "").strip('"')
    if not 1 <= len(boundary) <= 200:
        raise InvalidRequestError("multipart/form-data needs a boundary", param="Content-Type")
    return boundary


def read_idempotency_key(request: Request[Any, Any, Any]) -> str | None:
    """Return the Idempotency-Key, if there is one.

    Raises:
        InvalidRequestError: It is too long, or not of visible ASCII characters.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and _IDEMPOTENCY_KEY.fullmatch(key) is None:
        raise InvalidRequestError("Idempotency-Key is 1 to 200 visible ASCII characters", param="Idempotency-Key")
    return key
