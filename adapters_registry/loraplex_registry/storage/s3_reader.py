"""Reads one object of a bucket from beginning to end, and goes on where a connection broke."""

from __future__ import annotations

import io
from typing import Any

from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.storage.s3_bucket import S3Bucket
from loraplex_registry.storage.s3_failure import KeyMissingError, KeyTakenError, translated_failures

_FIRST_BYTES = 1 << 20
_MAX_BREAKS = 3


class S3Reader(io.RawIOBase):
    """An open object; its first MiB is here, so that small objects outlive their deletion.

    Raises:
        KeyMissingError: There is none of that key.
    """

    def __init__(self, bucket: S3Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._position = 0
        self._num_breaks = 0
        self._body, self._etag = bucket.stream(key)
        self._first = b""
        self._first = self.read(_FIRST_BYTES)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there next.

        Raises:
            StoreUnavailableError: The connection broke too often, or the object is gone.
        """
        piece = self._first[: len(buffer)] if self._first else self._read(len(buffer))
        if self._first:
            self._first = self._first[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Close the connection."""
        if not self.closed:
            self._body.close()
        super().close()

    def _read(self, size: int) -> bytes:
        while True:
            try:
                with translated_failures():
                    piece: bytes = self._body.read(size)
            except StoreUnavailableError:
                self._num_breaks += 1
                if self._num_breaks > _MAX_BREAKS:
                    raise
                self._reopen()
                continue
            self._position += len(piece)
            return piece

    def _reopen(self) -> None:
        self._body.close()
        try:
            self._body, _ = self._bucket.stream(self._key, self._position, self._etag)
        except (KeyMissingError, KeyTakenError) as error:
            raise StoreUnavailableError("The file was taken from the object store while it was read") from error
