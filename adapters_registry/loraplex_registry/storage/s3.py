"""Object store in a bucket of an S3 server.

An artifact lies at `sha256/ab/cd/<hex>/`: its files at `files/<sha256>`, whatever they are called, so that uploads at
once never write different bytes to one key; then `manifest.json`, created only if there is none: it says which names
the artifact has, and until it is there nothing is. Ages are those of the newest object, by the server's clock.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import msgspec

from loraplex_registry.errors import ArtifactMissingError, StoreUnavailableError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.storage.s3_address import S3Address
from loraplex_registry.storage.s3_bucket import S3Bucket
from loraplex_registry.storage.s3_failure import KeyMissingError, KeyTakenError
from loraplex_registry.storage.s3_parts import S3Parts
from loraplex_registry.storage.s3_reader import S3Reader
from loraplex_registry.storage.scratch import Scratch
from loraplex_registry.wire.adapter import Manifest
from loraplex_registry.wire.digest import artifact_path

_MAX_TRIES = 3
_PARALLEL = 4
_MAX_REMEMBERED = 1000


class S3Store(S3Parts):
    """Artifacts in a bucket; uploads on their way lie in a private folder of this machine."""

    def __init__(self, address: S3Address, scratch: Path) -> None:
        super().__init__(S3Bucket(address))
        self._scratch = Scratch(scratch)
        self._digest_to_names: dict[str, dict[str, str]] = {}

    def close(self) -> None:
        """Close connections."""
        self.bucket.close()

    def put(self, manifest: Manifest, files: Mapping[str, Path]) -> dict[str, str]:
        """Store an artifact (see `ObjectStore.put`)."""
        folder = artifact_path(manifest.digest)
        with unavailable_on_failure():
            for _ in range(_MAX_TRIES):
                self._put_files(folder, manifest, files)
                stored = self._create_manifest(folder, manifest)
                if stored is not None:
                    break
            else:
                raise StoreUnavailableError(f"{manifest.digest} cannot be kept: its files vanish")
        return {
            file.name: f"files/{file.name}" if file in stored.files else f"extra/{file.sha256}"
            for file in manifest.files
        }

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest if it and all files it names are there at their sizes."""
        folder = artifact_path(digest)
        key_to_size = {each.key: each.size for each in self.bucket.list(f"{folder}/")}
        if f"{folder}/manifest.json" not in key_to_size:
            return None
        try:
            manifest = self._get_manifest(digest)
        except KeyMissingError:
            return None
        if manifest is None:
            return None
        is_whole = all(key_to_size.get(_file_key(folder, file.sha256)) == file.size for file in manifest.files)
        return manifest if is_whole else None

    def open(self, digest: str, place: str) -> BinaryIO:
        """Open one file of an artifact."""
        kind, _, name = place.partition("/")
        try:
            sha256 = name if kind == "extra" else self._find_name(digest, name)
            return io.BufferedReader(S3Reader(self.bucket, _file_key(artifact_path(digest), sha256)), 1 << 16)
        except KeyMissingError as error:
            self._digest_to_names.pop(digest, None)
            raise ArtifactMissingError(f"{digest} has no {place}") from error

    def delete(self, digest: str) -> None:
        """Take an artifact away, its manifest first: from then on there is none."""
        folder = artifact_path(digest)
        self._digest_to_names.pop(digest, None)
        keys = [each.key for each in self.bucket.list(f"{folder}/")]
        if keys:
            self.bucket.delete([f"{folder}/manifest.json"])
            self.bucket.delete(keys)

    def list_artifacts(self) -> Iterator[tuple[str, float]]:
        """Yield digest and age of every artifact, whole or not."""
        for digest, objects in groupby(self.bucket.list("sha256/"), lambda each: _digest_of(each.key)):
            yield digest, min(each.age_s for each in objects)

    def find_age_s(self, digest: str) -> float | None:
        """Return the seconds since an artifact was last put."""
        return min((each.age_s for each in self.bucket.list(f"{artifact_path(digest)}/")), default=None)

    def create_staging(self) -> Path:
        """Create an empty folder for one upload."""
        return self._scratch.create()

    def sweep_staging(self, min_age_s: float) -> int:
        """Remove what uploads left here, and abort what they left half sent in the bucket."""
        return self._scratch.sweep(min_age_s) + self.bucket.abort_old_uploads(min_age_s)

    def _put_files(self, folder: str, manifest: Manifest, files: Mapping[str, Path]) -> None:
        """Write the files that are not there yet."""
        key_to_size = {each.key: each.size for each in self.bucket.list(f"{folder}/files/")}
        missing = {
            file.sha256: files[file.name]
            for file in manifest.files
            if key_to_size.get(_file_key(folder, file.sha256)) != file.size
        }
        with ThreadPoolExecutor(_PARALLEL) as pool:
            running = [
                pool.submit(self.bucket.put_file, _file_key(folder, sha256), source, sha256)
                for sha256, source in missing.items()
            ]
        for each in running:
            each.result()

    def _create_manifest(self, folder: str, manifest: Manifest) -> Manifest | None:
        """Write the manifest, or make the one that is there young; None if it went meanwhile.

        One that is damaged is replaced: no row can be served from it, and a whole copy heals it.
        """
        key, content = f"{folder}/manifest.json", msgspec.json.encode(manifest)
        try:
            self.bucket.put(key, content, is_new=True)
        except KeyTakenError:
            self._digest_to_names.pop(manifest.digest, None)
        else:
            return manifest
        if self.find_manifest(manifest.digest) is None:
            self.bucket.put(key, content)
        try:
            self.bucket.touch(key)
        except KeyMissingError:
            return None
        return self.find_manifest(manifest.digest)

    def _get_manifest(self, digest: str) -> Manifest | None:
        content = self.bucket.get(f"{artifact_path(digest)}/manifest.json")
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except UNREADABLE:
            return None
        return manifest if manifest.digest == digest else None

    def _find_name(self, digest: str, name: str) -> str:
        """Return the sha256 of the file that the manifest calls `name`; manifests do not change, so it is remembered.

        Raises:
            KeyMissingError: There is no such artifact or name.
        """
        names = self._digest_to_names.get(digest)
        if names is None:
            manifest = self._get_manifest(digest)
            names = {file.name: file.sha256 for file in manifest.files} if manifest else {}
            if len(self._digest_to_names) >= _MAX_REMEMBERED:
                self._digest_to_names.clear()
            self._digest_to_names[digest] = names
        if name not in names:
            raise KeyMissingError(name)
        return names[name]


def _file_key(folder: str, sha256: str) -> str:
    return f"{folder}/files/{sha256}"


def _digest_of(key: str) -> str:
    return f"sha256:{key.split('/')[3]}"
