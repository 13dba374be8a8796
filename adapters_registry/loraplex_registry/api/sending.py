"""Finds stored files and sends them byte for byte, read in a thread, a piece at a time; a damaged one never whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from litestar.response import Stream

from loraplex_registry.adapters.lookup import get_version
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.api.service import Services
from loraplex_registry.db.model import VersionRow
from loraplex_registry.errors import ArtifactMissingError, NotFoundError, RetiredError, StoreUnavailableError
from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.storage.verified import VerifiedReader
from loraplex_registry.wire.adapter import ManifestFile


class _StoredFile(ManifestFile, frozen=True):
    """A file as a version's row describes it; `place` is where it lies in the artifact."""

    place: str


def list_files(version: VersionRow) -> tuple[_StoredFile, ...]:
    """Return what a version's row says of its files, nothing for a full fine-tune, of which none are kept here."""
    return () if version.kind == "full" else msgspec.convert(version.files, tuple[_StoredFile, ...])


async def open_file(services: Services, tenant: TenantRef, adapter: str, number: int, name: str) -> Stream:
    """Return the answer that streams one file of a version as it was uploaded.

    Raises:
        NotFoundError: There is no such version, or it has no such file here.
        RetiredError: It is purged.
        StoreUnavailableError: The store does not have the file now.
    """
    async with services.database.read() as session:
        version = await get_version(session, tenant, adapter, number)
    if version.kind == "full":
        raise NotFoundError(
            f"Version {number} is a full fine-tune: no files of it are kept here, whoever runs its pool "
            f"{version.pool} has them",
            param="name",
        )
    if version.state == "purged":
        raise RetiredError(f"Version {number} is purged: its bytes are gone")
    file = next((file for file in list_files(version) if file.name == name), None)
    if file is None:
        raise NotFoundError(f"Version {number} has no file {name}", param="name")
    try:
        return await send_file(services.store, version.digest, file.place, file)
    except ArtifactMissingError as error:
        raise StoreUnavailableError(f"{file.name} is not in the object store now; tell an admin") from error


async def send_file(
    store: ObjectStore, digest: str, place: str, file: ManifestFile, *, is_strict: bool = True
) -> Stream:
    """Return the answer that streams one file of an artifact; its first piece is read before the headers go out.

    A file whose bytes have changed in the store is an error where it has one piece; else its connection breaks before
    the last. An engine, which verifies what it gets and blames the bytes for what is wrong with them, is sent them as
    they are (not `is_strict`).

    Raises:
        ArtifactMissingError: It is not in the store.
        StoreUnavailableError: The store cannot be read, or a small file is damaged.
    """
    reader = VerifiedReader(await asyncio.to_thread(store.open, digest, place), digest, file, is_strict=is_strict)
    try:
        first = await asyncio.to_thread(reader.read)
    except BaseException:
        reader.close()
        raise
    headers = {
        "Content-Length": str(file.size),
        "Content-Disposition": f'attachment; filename="{file.name}"',
        "ETag": f'"{file.sha256}"',
        "X-Content-Type-Options": "nosniff",
    }
    return Stream(_read(reader, first), headers=headers, media_type="application/octet-stream")


async def _read(reader: VerifiedReader, first: bytes) -> AsyncIterator[bytes]:
    piece = first
    try:
        while piece:
            yield piece
            piece = await asyncio.to_thread(reader.read)
    finally:
        reader.close()
