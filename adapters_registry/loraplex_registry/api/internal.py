"""Routes for the other parts: artifacts by digest for engines, names for gateways."""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa
from litestar import Controller, get
from litestar.datastructures import ResponseHeader
from litestar.response import Stream

from loraplex_registry.adapters.name import read_delta
from loraplex_registry.api.caller import check_admin, check_engine
from loraplex_registry.api.reading import read_query
from loraplex_registry.api.sending import send_file
from loraplex_registry.api.service import Call, Name, Services, Work
from loraplex_registry.db.model import VersionRow
from loraplex_registry.errors import ArtifactMissingError, InvalidRequestError, NotFoundError
from loraplex_registry.wire.adapter import Manifest, NamesDelta
from loraplex_registry.wire.digest import check_digest
from loraplex_registry.wire.protocol import HEADER, SPOKEN


class InternalRoutes(Controller):
    """`/internal`: never reached by clients."""

    path = "/internal"
    include_in_schema = False
    response_headers = (ResponseHeader(name=HEADER, value=SPOKEN),)

    @get("/artifacts/{digest:str}/manifest")
    async def manifest(self, request: Call, services: Work, digest: Name) -> Manifest:
        """Say what the artifact of a digest holds."""
        check_engine(request, services.settings.engine_key)
        return await _get_manifest(services, digest)

    @get("/artifacts/{digest:str}/files/{name:str}")
    async def file(self, request: Call, services: Work, digest: Name, name: Name) -> Stream:
        """Send one file of the artifact."""
        check_engine(request, services.settings.engine_key)
        manifest = await _get_manifest(services, digest)
        for file in manifest.files:
            if file.name == name:
                return await _send(services, digest, name, file)
        raise NotFoundError(f"{digest} has no file {name}", param="name")

    @get("/names")
    async def names(self, request: Call, services: Work) -> NamesDelta:
        """Return what changed after `?since=`."""
        check_admin(request, writes=False)
        since = read_query(request, "since").get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 19):
            raise InvalidRequestError("since is an epoch", param="since")
        return await read_delta(services.database, int(since), is_gated=services.settings.is_gated)


async def _get_manifest(services: Services, digest: str) -> Manifest:
    """Return the manifest of an artifact that a version refers to."""
    try:
        check_digest(digest)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="digest") from error
    query = sa.select(VersionRow.id).where(VersionRow.digest == digest, VersionRow.state != "purged").limit(1)
    async with services.database.read() as session:
        is_known = (await session.execute(query)).first() is not None
    manifest = await asyncio.to_thread(services.store.find_manifest, digest) if is_known else None
    if manifest is None:
        raise NotFoundError(f"There is no artifact {digest}", param="digest")
    return manifest


async def _send(services: Services, digest: str, name: str, file: Any) -> Stream:
    try:
        return await send_file(services.store, digest, f"files/{name}", file, is_strict=False)
    except ArtifactMissingError as error:
        raise NotFoundError(f"There is no artifact {digest}", param="digest") from error
