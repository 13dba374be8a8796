"""Routes of uploads in parts."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from litestar import Controller, Response, delete, get, post, put
from litestar.params import FromPath

from loraplex_registry.api.caller import WRITE, enter_tenant
from loraplex_registry.api.reading import check_plain, read_json, read_query
from loraplex_registry.api.service import Call, Name, Services, Work
from loraplex_registry.api.upload import build_large_order, read_idempotency_key, read_wait_s
from loraplex_registry.errors import NotFoundError
from loraplex_registry.storage.store import PartPlace
from loraplex_registry.uploads.announcement import UploadAnnouncement
from loraplex_registry.uploads.order import UploadOrder
from loraplex_registry.wire.upload import UploadView

UploadId: TypeAlias = FromPath[str]
Index: TypeAlias = FromPath[str]

_UPLOADS = "/{adapter:str}/uploads"
_UPLOAD = _UPLOADS + "/{upload:str}"
_INDEX = re.compile(r"0|[1-9][0-9]{0,4}")


class UploadRoutes(Controller):
    """`/api/v1/tenants/{tenant}/adapters/{adapter}/uploads`."""

    path = "/api/v1/tenants/{tenant:str}/adapters"

    @post(_UPLOADS)
    async def create(self, request: Call, services: Work, tenant: Name, adapter: Name) -> UploadView:
        """Begin an upload in parts."""
        target, caller = enter_tenant(request, tenant, WRITE)
        order = build_large_order(request, target, adapter, caller)
        announced = await read_json(request, UploadAnnouncement)
        return await services.large_uploads.create(order, announced, _address(request, order))

    @get(_UPLOAD)
    async def show(self, request: Call, services: Work, tenant: Name, adapter: Name, upload: UploadId) -> UploadView:
        """Show which parts have arrived, with new addresses for the others."""
        order = _enter(request, tenant, adapter)
        read_query(request)
        return await services.large_uploads.show(order, upload, _address(request, order))

    @put(_UPLOAD + "/files/{file:str}/parts/{part:str}", status_code=204, request_max_body_size=None)
    async def write_part(
        self, request: Call, services: Work, tenant: Name, adapter: Name, upload: UploadId, file: Index, part: Index
    ) -> None:
        """Take a part, where the store takes none itself."""
        order = _enter(request, tenant, adapter)
        read_query(request)
        check_plain(request)
        place = PartPlace(_read_index(file), _read_index(part))
        checksum = request.headers.get("x-amz-checksum-sha256")
        await services.large_uploads.write_part(order, upload, place, checksum, request.stream())

    @post(_UPLOAD + "/complete")
    async def complete(
        self, request: Call, services: Work, tenant: Name, adapter: Name, upload: UploadId
    ) -> Response[Any]:
        """Publish an upload whose parts have arrived."""
        order = _enter(request, tenant, adapter, services)
        result = await services.large_uploads.complete(order, upload)
        return Response(result.body, status_code=result.status)

    @delete(_UPLOAD, status_code=204)
    async def abort(self, request: Call, services: Work, tenant: Name, adapter: Name, upload: UploadId) -> None:
        """Give an upload up."""
        order = _enter(request, tenant, adapter)
        read_query(request)
        await services.large_uploads.abort(order, upload)


def _enter(request: Call, tenant: str, adapter: str, waits: Services | None = None) -> UploadOrder:
    """Return an order of nothing but who asks for whose upload; of `?wait=` and a key, if it `waits`."""
    target, caller = enter_tenant(request, tenant, WRITE)
    if waits is None:
        return UploadOrder(tenant=target, adapter=adapter, by=caller)
    wait_s = read_wait_s(read_query(request, "wait"), waits.settings.check_timeout_s)
    key = read_idempotency_key(request)
    return UploadOrder(tenant=target, adapter=adapter, by=caller, wait_s=wait_s, idempotency_key=key)


def _address(request: Call, order: UploadOrder) -> str:
    """Where the client has found the uploads of this adapter."""
    base = str(request.base_url).rstrip("/")
    return f"{base}/api/v1/tenants/{order.tenant.name}/adapters/{order.adapter}/uploads"


def _read_index(text: str) -> int:
    if _INDEX.fullmatch(text) is None:
        raise NotFoundError("Files and parts are numbered from 0, in plain digits", param="part")
    return int(text)
