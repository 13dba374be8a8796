"""The large way of uploading: files are announced, sent in parts, then completed by the same path as the small way.

Parts go to the store itself where it signs requests, else through `write_part`. Completing joins them on our disk; it
may die at any point and be repeated, and its answer is stored in the transaction that publishes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import UploadRow
from loraplex_registry.errors import (
    AdapterRejectedError,
    ArtifactMissingError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RegistryError,
)
from loraplex_registry.storage.store import Part, PartPlace, Store
from loraplex_registry.uploads.admission import Admission, hash_order
from loraplex_registry.uploads.announcement import UploadAnnouncement, check_announcement, cut, cut_file, read_files
from loraplex_registry.uploads.heartbeat import beating
from loraplex_registry.uploads.idempotency import IdempotencyKeys
from loraplex_registry.uploads.order import StagedFile, UploadOrder, UploadResult
from loraplex_registry.uploads.publish import Seen
from loraplex_registry.uploads.receive import receive_part
from loraplex_registry.uploads.upload_row import LIFE, Options, UploadRows
from loraplex_registry.uploads.upload_view import show_upload
from loraplex_registry.wire.adapter import Report, VersionView
from loraplex_registry.wire.ids import new_public_id
from loraplex_registry.wire.naming import check_name
from loraplex_registry.wire.upload import UploadView

_log = logging.getLogger(__name__)


class _Created(msgspec.Struct, frozen=True):
    """What is stored for a repeated `POST .../uploads`: the rest is shown as it is then."""

    id: str


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """How a refusal is stored; without a report the request was at fault."""

    message: str
    param: str | None
    report: Report | None


class LargeUploads:
    """Takes uploads in parts; through the admission the only way from parts to a version."""

    def __init__(self, database: Database, store: Store, admission: Admission) -> None:
        self._store = store
        self._admission = admission
        self._rows = UploadRows(database)
        self._keys = IdempotencyKeys(database)

    async def create(self, order: UploadOrder, announced: UploadAnnouncement, address: str) -> UploadView:
        """Begin an upload.

        Args:
            order: What is asked for; scope and tenant are judged already.
            announced: Its files and their parts.
            address: Where clients reach the uploads of this adapter, for parts that go through the registry.

        Raises:
            AdapterRejectedError: A name or a size is not allowed; carries the report.
            QuotaExceededError: The tenant has no room for it.
            RegistryError: The request is at fault, or the registry is not able.
        """
        check_name(order.adapter, "adapter")
        route = f"POST {order.tenant.name}/{order.adapter}/uploads"
        async with (
            self._admission.refusals_recorded(order),
            self._keys.hold(order.by, order.idempotency_key, route) as claim,
        ):
            check_announcement(announced)
            content = hash_order(order, {file.name: file.sha256 for file in announced.files})
            answer = claim.find_answer(content)
            if answer is not None:
                public_id = msgspec.json.decode(msgspec.json.encode(answer.body), type=_Created).id
                return await self.show(order, public_id, address)
            await self._admission.check_room(order, announced.size_bytes)
            row = await self._create_row(order, announced)
            created = msgspec.Raw(msgspec.json.encode(_Created(row.public_id)))
            await self._keys.finish(claim, content, UploadResult(201, created))
            return await self._show(row, address)

    async def show(self, order: UploadOrder, public_id: str, address: str) -> UploadView:
        """Return which parts have arrived, and how to send the others.

        Raises:
            NotFoundError: There is no such upload.
        """
        return await self._show(await self._rows.get(order.tenant, order.adapter, public_id), address)

    async def write_part(
        self, order: UploadOrder, public_id: str, place: PartPlace, checksum: str | None, chunks: AsyncIterator[bytes]
    ) -> None:
        """Take one part through the registry.

        Args:
            order: Whose upload it is.
            public_id: Of the upload.
            place: Which part it is.
            checksum: The header `x-amz-checksum-sha256`: the sha256 of the part in base64.
            chunks: Its bytes as they arrive.

        Raises:
            NotFoundError: There is no such upload or part.
            ConflictError: The upload takes no parts any more.
            InvalidRequestError: The bytes or the header are not those of the part.
        """
        part = _find_part(await self._get_open(order, public_id), place)
        if checksum != _encode_hash(part.sha256):
            raise InvalidRequestError(
                "x-amz-checksum-sha256 is the sha256 of this part, as it was announced, in base64",
                param="x-amz-checksum-sha256",
            )
        async with self._admission.staging() as folder:
            path = folder / "part"
            await receive_part(chunks, path, part.size)
            # NOTE: again, as the upload may have been completed or given up while the bytes came
            await self._get_open(order, public_id)
            await asyncio.to_thread(self._store.write, public_id, part, path)

    async def complete(self, order: UploadOrder, public_id: str) -> UploadResult:
        """Publish an upload all of whose parts are there, or return what that has led to before.

        Args:
            order: Who asks, and how long to wait; what to do was said when the upload began.
            public_id: Of the upload.

        Raises:
            AdapterRejectedError: It cannot be served exactly; carries the report, as every later call does.
            ConflictError: Parts are missing, or another request completes it.
            RegistryError: The registry is not able; the upload is open still and may be completed again.
        """
        row = await self._rows.get(order.tenant, order.adapter, public_id)
        route = f"POST {order.tenant.name}/{order.adapter}/uploads/{public_id}/complete"
        async with self._keys.hold(order.by, order.idempotency_key, route) as claim:
            asked = _with_options(order, row)
            result = claim.find_answer("") or await self._find_answer(asked, row) or await self._complete(asked, row)
            await self._keys.finish(claim, "", result)
            return result

    async def abort(self, order: UploadOrder, public_id: str) -> None:
        """Give an upload up and drop its parts.

        Raises:
            NotFoundError: There is no such upload.
            ConflictError: It is being completed, or is complete.
        """
        row = await self._rows.get(order.tenant, order.adapter, public_id)
        if not await self._rows.abort(row):
            raise ConflictError(f"{public_id} is complete, or about to be", param="upload")
        await asyncio.to_thread(self._store.drop, public_id)

    async def _create_row(self, order: UploadOrder, announced: UploadAnnouncement) -> UploadRow:
        seen = await self._admission.look(order)
        options = Options(
            promote=order.promote,
            is_dry_run=order.is_dry_run,
            base=order.base,
            began_with=None if seen.began_with is None else str(seen.began_with),
            live_revision=seen.live_revision,
        )
        now = datetime.now(UTC)
        values = {
            "public_id": new_public_id("upl"),
            "adapter": order.adapter,
            "files": msgspec.to_builtins(announced.files),
            "options": msgspec.to_builtins(options),
            "size_bytes": announced.size_bytes,
            "created_at": now,
            "created_by": order.by.actor,
            "touched_at": now,
            "expires_at": now + LIFE,
        }
        return await self._rows.create(order.tenant, values)

    async def _show(self, row: UploadRow, address: str) -> UploadView:
        return await asyncio.to_thread(show_upload, self._store, row, address)

    async def _get_open(self, order: UploadOrder, public_id: str) -> UploadRow:
        row = await self._rows.get(order.tenant, order.adapter, public_id)
        if row.state != "open":
            raise ConflictError(f"{public_id} takes no parts any more: it is {row.state}", param="upload")
        return row

    async def _find_answer(self, order: UploadOrder, row: UploadRow) -> UploadResult | None:
        """Return what a completed upload has led to, or raise its refusal again."""
        if row.status is None or row.body is None:
            return None
        if row.status >= 400:
            refusal = msgspec.json.decode(row.body, type=_Refusal)
            if refusal.report is None:
                raise InvalidRequestError(refusal.message, param=refusal.param)
            raise AdapterRejectedError(refusal.report, refusal.message, param=refusal.param)
        if order.is_dry_run:
            return UploadResult(row.status, msgspec.Raw(row.body.encode()))
        stored = UploadResult(row.status, msgspec.json.decode(row.body, type=VersionView))
        return await self._settle(order, row, stored)

    async def _settle(self, order: UploadOrder, row: UploadRow, stored: UploadResult) -> UploadResult:
        result = await self._admission.settle(order, stored, order.wait_s)
        if result is not stored:
            await self._rows.improve(row, result.status, result.encode())
        return result

    async def _complete(self, order: UploadOrder, row: UploadRow) -> UploadResult:
        async with self._claimed(row):
            await self._check_received(row)
            async with self._admission.refusals_recorded(order), self._admission.staging() as folder:
                try:
                    files = await asyncio.to_thread(self._join, row, folder)
                    seen = _as_it_began(await self._admission.look(order), row)
                    result = await self._admission.admit(order, seen, files, partial(self._store_answer, row))
                except (AdapterRejectedError, _WrongContentError) as refusal:
                    await self._store_refusal(row, refusal)
                    raise
                if order.is_dry_run:
                    await self._rows.finish_alone(row, result.status, result.encode())
        await self._drop(row)
        await self._rows.improve(row, result.status, result.encode())
        return result

    @asynccontextmanager
    async def _claimed(self, row: UploadRow) -> AsyncIterator[None]:
        """Hold the upload; what fails without an answer gives it back."""
        if not await self._rows.try_claim(row):
            raise ConflictError(f"{row.public_id} is being completed by another request", param="upload")
        try:
            async with beating(partial(self._rows.touch, row)):
                yield
        except BaseException:
            # an upload that has its answer stays as it is
            await self._rows.reopen(row)
            raise

    async def _check_received(self, row: UploadRow) -> None:
        files = read_files(row.files)
        received = await asyncio.to_thread(self._store.list, row.public_id)
        missing = [part.place for part in cut(files) if received.get(part.place) != part.size]
        if missing:
            named = ", ".join(f"{files[place.file].name} {place.number}" for place in missing[:5])
            raise ConflictError(f"{len(missing)} parts have not arrived ({named}); send them first", param="parts")

    def _join(self, row: UploadRow, folder: Path) -> Mapping[str, StagedFile]:
        joined: dict[str, StagedFile] = {}
        for index, file in enumerate(read_files(row.files)):
            path = folder / f"file-{index}"
            try:
                sha256 = self._store.join(row.public_id, list(cut_file(index, file)), path)
            except ArtifactMissingError as error:
                raise ConflictError(f"A part of {file.name} is gone; send it again", param="parts") from error
            if sha256 != file.sha256:
                raise _WrongContentError(
                    f"{file.name} has the sha256 {sha256}, not the one that was announced; begin a new upload",
                    param=f"files[{index}].sha256",
                )
            joined[file.name] = StagedFile(path, file.size, sha256)
        return joined

    async def _store_answer(self, row: UploadRow, change: Change, result: UploadResult) -> None:
        if not await self._rows.finish(change.session, row, result.status, result.encode()):
            raise NotFoundError(f"{row.public_id} is over", param="upload")

    async def _store_refusal(self, row: UploadRow, refusal: AdapterRejectedError | _WrongContentError) -> None:
        report = refusal.report if isinstance(refusal, AdapterRejectedError) else None
        body = msgspec.json.encode(_Refusal(message=refusal.message, param=refusal.param, report=report)).decode()
        await self._rows.finish_alone(row, 400 if report is None else 422, body)
        await self._drop(row)

    async def _drop(self, row: UploadRow) -> None:
        """Drop the parts of an upload that has its answer; what stays is the sweeper's."""
        try:
            await asyncio.to_thread(self._store.drop, row.public_id)
        except RegistryError as error:
            _log.warning("the parts of %s cannot be removed: %s", row.public_id, error)


class _WrongContentError(InvalidRequestError):
    """The parts are right and the whole is not: what was announced does not fit together."""


def _with_options(order: UploadOrder, row: UploadRow) -> UploadOrder:
    """The order of who asks now, with what was asked for when the upload began."""
    options = msgspec.convert(row.options, Options)
    return replace(order, promote=options.promote, is_dry_run=options.is_dry_run, base=options.base)


def _as_it_began(seen: Seen, row: UploadRow) -> Seen:
    options = msgspec.convert(row.options, Options)
    began_with = None if options.began_with is None else uuid.UUID(options.began_with)
    return replace(seen, began_with=began_with, live_revision=options.live_revision)


def _find_part(row: UploadRow, place: PartPlace) -> Part:
    for part in cut(read_files(row.files)):
        if part.place == place:
            return part
    raise NotFoundError(f"{row.public_id} has no part {place.number} of a file {place.file}", param="part")


def _encode_hash(sha256: str) -> str:
    return base64.b64encode(bytes.fromhex(sha256)).decode()
