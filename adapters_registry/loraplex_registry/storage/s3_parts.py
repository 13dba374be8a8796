"""Parts of large uploads in a bucket: `staging/<upload>/<file>.<number>`, sent by clients themselves by presigned URLs.

The server takes only the very bytes that a URL was signed for, so that what is there is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, groupby
from pathlib import Path

from loraplex_registry.errors import ArtifactMissingError, InvalidRequestError
from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.storage.file import hash_file
from loraplex_registry.storage.joining import check_part
from loraplex_registry.storage.part import Part, PartPlace, SignedPart
from loraplex_registry.storage.s3_bucket import S3Bucket
from loraplex_registry.storage.s3_failure import KeyMissingError
from loraplex_registry.storage.s3_reader import S3Reader

_FOLDER = "staging/"
_PIECE_BYTES = 1 << 20
_PARALLEL = 4


class S3Parts:
    """The parts below the bucket's prefix."""

    def __init__(self, bucket: S3Bucket) -> None:
        self.bucket = bucket

    def sign(self, upload: str, part: Part, life_s: int) -> SignedPart | None:
        """Return how a client sends `part` to the bucket (see `PartStore.sign`)."""
        if self.bucket.address.checksum != "sha256":
            return None
        return self.bucket.sign_put(_key(upload, part.place), part.size, part.sha256, life_s)

    def write(self, upload: str, part: Part, source: Path) -> None:
        """Keep a whole part (see `PartStore.write`)."""
        with unavailable_on_failure():
            if (source.stat().st_size, hash_file(source)) != (part.size, part.sha256):
                raise InvalidRequestError("The bytes of this part are not those that were announced")
            self.bucket.put_file(_key(upload, part.place), source, part.sha256)

    def list(self, upload: str) -> dict[PartPlace, int]:
        """Return the sizes of the parts that are there (see `PartStore.list`)."""
        return {_place(each.key): each.size for each in self.bucket.list(f"{_FOLDER}{upload}/")}

    def join(self, upload: str, parts: Sequence[Part], to: Path) -> str:
        """Write `parts` to one file, several at a time (see `PartStore.join`)."""
        starts = accumulate((part.size for part in parts), initial=0)
        with unavailable_on_failure():
            descriptor = os.open(to, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with ThreadPoolExecutor(_PARALLEL) as pool:
                    running = [
                        pool.submit(self._fetch, upload, part, descriptor, start)
                        for part, start in zip(parts, starts, strict=False)
                    ]
                    try:
                        for each in running:
                            each.result()
                    except BaseException:
                        pool.shutdown(cancel_futures=True)
                        raise
            finally:
                os.close(descriptor)
            return hash_file(to)

    def drop(self, upload: str) -> None:
        """Remove all parts of an upload (see `PartStore.drop`)."""
        self.bucket.delete([each.key for each in self.bucket.list(f"{_FOLDER}{upload}/")])

    def list_uploads(self) -> Iterator[tuple[str, float]]:
        """Yield every upload that has parts, and its age (see `PartStore.list_uploads`)."""
        for upload, parts in groupby(self.bucket.list(_FOLDER), lambda each: each.key.split("/")[1]):
            yield upload, min(part.age_s for part in parts)

    def _fetch(self, upload: str, part: Part, descriptor: int, start: int) -> None:
        """Write one part where it belongs, and never a byte more than it was to have."""
        digest, size = hashlib.sha256(), 0
        try:
            with closing(S3Reader(self.bucket, _key(upload, part.place))) as reader:
                while size <= part.size and (piece := reader.read(_PIECE_BYTES)):
                    digest.update(piece)
                    os.pwrite(descriptor, piece[: part.size - size], start + size)
                    size += len(piece)
        except KeyMissingError as error:
            raise ArtifactMissingError(f"A part of {upload} is not there") from error
        check_part(part, size, digest.hexdigest())


def _key(upload: str, place: PartPlace) -> str:
    return f"{_FOLDER}{upload}/{place.file}.{place.number}"


def _place(key: str) -> PartPlace:
    file, _, number = key.rpartition("/")[2].partition(".")
    return PartPlace(int(file), int(number))
