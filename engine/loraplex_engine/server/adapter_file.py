"""The chat template that an adapter brings, as text: from the registry, or from the disk if the registry is away.

The registry's manifest says what the bytes must be. Reading blocks, so it has threads of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex_engine.errors import InvalidRequestError, LoadFailedError
from loraplex_engine.server.thread import run_in_thread
from loraplex_registry.peft.file_rule import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from loraplex_registry.wire.digest import artifact_path

if TYPE_CHECKING:
    from loraplex_registry.wire.client import ArtifactClient

_log = logging.getLogger(__name__)
_FETCH_S = 10.0
_MAX_FETCHES = 4


class AdapterFiles:
    """Templates of adapters by digest."""

    def __init__(self, cache_dir: str, registry_url: str = "", engine_key: str = "") -> None:
        self._root = Path(cache_dir) / "adapters"
        self._registry_url = registry_url
        self._engine_key = engine_key
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="adapter-file")
        self._client: ArtifactClient | None = None

    def close(self) -> None:
        """Let the threads end and close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    async def find(self, digest: str) -> str | None:
        """Return the text of an adapter's template, None if it brings none.

        Raises:
            LoadFailedError: Neither the registry nor the disk knows now.
            InvalidRequestError: The template is no UTF-8.
        """
        if self._registry_url and self._client is None:
            # not at the top: httpx is heavy, and an engine without a registry needs none
            from loraplex_registry.wire.client import ArtifactClient

            self._client = ArtifactClient(self._registry_url, self._engine_key)
        try:
            async with asyncio.timeout(_FETCH_S):
                data = await run_in_thread(partial(self._read, digest), self._threads)
        except TimeoutError:
            raise LoadFailedError("The registry takes too long to send this adapter's chat template.") from None
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError("The adapter's chat template is not UTF-8.", param="messages") from error

    def _read(self, digest: str) -> bytes | None:
        if self._client is None:
            return self._read_disk(digest)
        from loraplex_registry.wire.client import ArtifactError, ArtifactMissingError

        try:
            return self._fetch(self._client, digest)
        except ArtifactMissingError:
            # what was fetched before still serves
            return self._read_disk(digest, "The registry does not have this adapter's files.")
        except ArtifactError as error:
            _log.warning("the chat template of %s could not be fetched: %s", digest, error)
            return self._read_disk(digest)

    def _fetch(self, client: ArtifactClient, digest: str) -> bytes | None:
        from loraplex_registry.wire.client import ArtifactError

        file = next((file for file in client.manifest(digest).files if file.name == TEMPLATE_FILE), None)
        if file is None:
            return None
        data = client.read_file(digest, TEMPLATE_FILE, MAX_TEMPLATE_BYTES)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ArtifactError(f"{TEMPLATE_FILE} of {digest} is not what its manifest says")
        return data

    def _read_disk(self, digest: str, otherwise: str = "The adapter's files cannot be had now.") -> bytes | None:
        folder = self._root / artifact_path(digest)
        try:
            return (folder / TEMPLATE_FILE).read_bytes()
        except OSError as error:
            if folder.is_dir():
                return None
            raise LoadFailedError(otherwise) from error
