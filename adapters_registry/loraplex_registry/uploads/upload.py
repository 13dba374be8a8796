"""The small way of uploading: one multipart body, received, checked, stored and published in one request."""

from __future__ import annotations

from collections.abc import AsyncIterator

from loraplex_registry.db.database import Database
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.admission import Admission, hash_order
from loraplex_registry.uploads.idempotency import IdempotencyKeys
from loraplex_registry.uploads.order import UploadOrder, UploadResult
from loraplex_registry.uploads.receive import receive
from loraplex_registry.wire.naming import check_name

_MULTIPART_OVERHEAD_BYTES = 16 << 10
"""What the headers of parts may take of a body: a quota is about files."""


class Uploads:
    """Receives uploads in one body and hands them to the admission."""

    def __init__(self, database: Database, admission: Admission, settings: RegistrySettings) -> None:
        self._admission = admission
        self._settings = settings
        self._keys = IdempotencyKeys(database)

    async def upload(
        self, order: UploadOrder, chunks: AsyncIterator[bytes], boundary: str, length: int
    ) -> UploadResult:
        """Admit an adapter.

        Args:
            order: What is asked for; scope and tenant are judged already.
            chunks: The multipart body as it arrives.
            boundary: Of its parts.
            length: Its length in bytes as announced, 0 if it was not.

        Raises:
            AdapterRejectedError: It cannot be served exactly; carries the report.
            RegistryError: The request is at fault, or the registry is not able; nothing was stored.
        """
        check_name(order.adapter, "adapter")
        seen = await self._admission.look(order)
        route = f"POST {order.tenant.name}/{order.adapter}/versions"
        async with (
            self._admission.refusals_recorded(order),
            self._keys.hold(order.by, order.idempotency_key, route) as claim,
        ):
            if claim.answer is None:
                await self._admission.check_room(order, max(0, length - _MULTIPART_OVERHEAD_BYTES))
            async with self._admission.staging() as folder:
                files = await receive(chunks, boundary, folder, self._settings.max_upload_bytes)
                content = hash_order(order, {name: file.sha256 for name, file in files.items()})
                result = claim.find_answer(content) or await self._admission.admit(order, seen, files)
                await self._keys.finish(claim, content, result)
                return result
