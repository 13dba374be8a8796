"""Fetches artifacts by digest from the registry, for the engine's loader process (synchronous)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from loraplex_registry.errors import ArtifactDamagedError, ArtifactError, ArtifactMissingError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.wire.adapter import Manifest
from loraplex_registry.wire.digest import check_digest
from loraplex_registry.wire.protocol import HEADER, find_mismatch

__all__ = ["ArtifactClient", "ArtifactDamagedError", "ArtifactError", "ArtifactMissingError"]
_TIMEOUT = httpx.Timeout(30.0, connect=2.0)
_MAX_TRIES = 4
_MAX_FILE_BYTES = 8 << 30


class _BusyError(Exception):
    """The registry answered 5xx: worth another try."""


class ArtifactClient:
    """Reads `/internal/artifacts` of one registry with the engine key; follows no redirect."""

    def __init__(self, registry_url: str, engine_key: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(
            base_url=registry_url.rstrip("/"),
            headers={"Authorization": f"Bearer {engine_key}", "Accept-Encoding": "identity"},
            timeout=_TIMEOUT,
            transport=transport,
            # a proxy of the environment would see the engine key
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of the artifact `digest`.

        Raises:
            ArtifactMissingError: The registry has no such artifact.
            ArtifactDamagedError: What it sends is no manifest, or another's.
            ArtifactError: The registry does not answer, or answers something else.
        """
        path = f"/internal/artifacts/{check_digest(digest)}/manifest"
        for wait_s in _waits():
            try:
                with self._open(path) as response:
                    return _read_manifest(response.read(), digest)
            except (httpx.TransportError, _BusyError) as error:
                _sleep_or_raise(wait_s, error)
        raise AssertionError("unreachable")

    def fetch_file(self, digest: str, name: str, to: Path) -> int:
        """Stream file `name` of the artifact `digest` to the path `to`, replacing what is there.

        Nothing is verified beyond its length: the caller recomputes the digest from the bytes.

        Returns:
            The number of bytes written.

        Raises:
            ArtifactMissingError: The registry has no such artifact or file.
            ArtifactError: The registry does not answer, or the stream broke each time.
        """
        path = f"/internal/artifacts/{check_digest(digest)}/files/{name}"
        for wait_s in _waits():
            try:
                with self._open(path) as response, to.open("wb") as file:
                    return _copy(response, file.write)
            except (httpx.TransportError, _BusyError) as error:
                _sleep_or_raise(wait_s, error)
        raise AssertionError("unreachable")

    def read_file(self, digest: str, name: str, max_bytes: int) -> bytes:
        """Return the bytes of file `name` of the artifact `digest`, unverified.

        Raises:
            ArtifactMissingError: The registry has no such artifact or file.
            ArtifactError: The registry does not answer, or the file is larger than `max_bytes`.
        """
        path = f"/internal/artifacts/{check_digest(digest)}/files/{name}"
        for wait_s in _waits():
            data = bytearray()
            try:
                with self._open(path) as response:
                    _copy(response, data.extend, max_bytes)
                    return bytes(data)
            except (httpx.TransportError, _BusyError) as error:
                _sleep_or_raise(wait_s, error)
        raise AssertionError("unreachable")

    @contextmanager
    def _open(self, path: str) -> Iterator[httpx.Response]:
        with self._http.stream("GET", path) as response:
            if mismatch := find_mismatch("the registry", response.headers.get(HEADER)):
                raise ArtifactError(mismatch)
            if response.status_code == 404:
                raise ArtifactMissingError
            if response.status_code >= 500:
                raise _BusyError(f"it answered {response.status_code}")
            if response.status_code != 200:
                raise ArtifactError(f"the registry answered {response.status_code}")
            yield response


def _waits() -> Iterator[float | None]:
    """Yield the jittered wait in seconds after each try, None after the last."""
    for attempt in range(_MAX_TRIES - 1):
        yield 0.1 * 2**attempt * (0.5 + random.random())  # noqa: S311 - jitter is no secret
    yield None


def _sleep_or_raise(wait_s: float | None, error: Exception) -> None:
    if wait_s is None:
        raise ArtifactError(f"the registry does not answer: {error}") from error
    time.sleep(wait_s)


def _read_manifest(body: bytes, digest: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except UNREADABLE as error:
        raise ArtifactDamagedError(f"The manifest of {digest} cannot be read") from error
    if manifest.digest != digest:
        raise ArtifactDamagedError(f"The manifest of {digest} is of another digest")
    return manifest


def _copy(response: httpx.Response, write: Callable[[bytes], object], max_bytes: int = _MAX_FILE_BYTES) -> int:
    size = 0
    for chunk in response.iter_bytes():
        size += len(chunk)
        if size > max_bytes:
            raise ArtifactError(f"a file of the artifact is larger than {max_bytes} bytes")
        write(chunk)
    return size
