"""Reads a stored file so that nobody gets the whole of one whose bytes have changed since it was stored."""

from __future__ import annotations

import hashlib
import logging
from typing import BinaryIO

from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.wire.adapter import ManifestFile

PIECE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class VerifiedReader:
    """A file read in pieces; the last one is held back until all bytes are known to be the stored ones.

    A reader that is not strict gives that one out, too, and only logs: for those who verify what they get.
    """

    def __init__(self, opened: BinaryIO, digest: str, file: ManifestFile, *, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self._opened = opened
        self._digest = digest
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0
        self._held: bytes | None = None

    def read(self) -> bytes:
        """Return the next piece, empty at the end.

        Raises:
            StoreUnavailableError: The bytes cannot be read, or, to a strict reader, are not those that were stored; the
                log names the artifact.
        """
        if self._held is None:
            self._held = self._fetch()
        piece = self._held
        if piece:
            self._held = self._fetch()
        if not self._held:
            self._check()
        return piece

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _fetch(self) -> bytes:
        try:
            piece = self._opened.read(PIECE_BYTES)
        except OSError as error:
            _log.error("%s of %s cannot be read: %s", self._file.name, self._digest, error.strerror)
            raise StoreUnavailableError from error
        self._hash.update(piece)
        self._size += len(piece)
        return piece

    def _check(self) -> None:
        if (self._size, self._hash.hexdigest()) == (self._file.size, self._file.sha256):
            return
        _log.error("%s of %s is damaged in the object store: restore it", self._file.name, self._digest)
        if self._is_strict:
            raise StoreUnavailableError(f"{self._file.name} is damaged in the object store; tell an admin")
