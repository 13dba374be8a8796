"""Reads what an upload asks for from its request, before the body."""

from __future__ import annotations

import re
from typing import Any, cast

from litestar import Request

from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.api.reading import check_plain, read_flag, read_query
from loraplex_registry.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    PermissionDeniedError,
    UnsupportedMediaTypeError,
    UnsupportedParameterError,
)
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.order import Promote, UploadOrder
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
        UnsupportedMediaTypeError: The body is not multipart/form-data.
        PayloadTooLargeError: Its announced length is too large.
    """
    query = read_query(request, "promote", "dry_run", "wait", "base")
    if "base" in query and not caller.is_admin:
        raise PermissionDeniedError("Only an admin may force a base", param="base")
    _check_length(request, settings)
    return UploadOrder(
        tenant=tenant,
        adapter=adapter,
        by=caller,
        boundary=_read_boundary(request),
        promote=_read_promote(query),
        is_dry_run=read_flag(query, "dry_run"),
        base=query.get("base"),
        wait_s=_read_wait_s(query.get("wait"), settings),
        idempotency_key=_read_idempotency_key(request),
    )


def _read_promote(query: dict[str, str]) -> Promote:
    promote = query.get("promote", "auto")
    if promote not in _PROMOTE:
        raise InvalidRequestError("promote is auto, always or never", param="promote")
    return cast("Promote", promote)


def _read_wait_s(text: str | None, settings: RegistrySettings) -> float:
    if text is None:
        return settings.check_timeout_s
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MAX_WAIT_S):
        raise UnsupportedParameterError(
            f"wait is 1 to {_MAX_WAIT_S} seconds: an upload is judged before it is answered", param="wait"
        )
    return float(text)


def _read_boundary(request: Request[Any, Any, Any]) -> str:
    kind, parameters = request.content_type
    if kind != "multipart/form-data":
        raise UnsupportedMediaTypeError("Send multipart/form-data, one part `files` per file")
    check_plain(request)
    boundary = parameters.get("boundary", "").strip('"')
    if not 1 <= len(boundary) <= 200:
        raise InvalidRequestError("multipart/form-data needs a boundary", param="Content-Type")
    return boundary


def _check_length(request: Request[Any, Any, Any], settings: RegistrySettings) -> None:
    text = request.headers.get("content-length", "0")
    if text.isascii() and text.isdigit() and int(text) > settings.max_upload_bytes:
        raise PayloadTooLargeError(f"The body is larger than {settings.max_upload_bytes >> 20} MiB")


def _read_idempotency_key(request: Request[Any, Any, Any]) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and _IDEMPOTENCY_KEY.fullmatch(key) is None:
        raise InvalidRequestError("Idempotency-Key is 1 to 200 visible ASCII characters", param="Idempotency-Key")
    return key
