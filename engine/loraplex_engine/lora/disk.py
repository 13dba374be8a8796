"""Verified adapter files on disk, by digest: the cache between the registry and host memory.

`AdapterDisk` decides what may enter and what may be used: a folder's canonical digest is recomputed before it is
published, and again at each later load, since disks forget. Room and removal are the `FolderCache`'s.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraplex_engine.errors import DigestMismatchError
from loraplex_engine.lora.folder_cache import FolderCache, sync
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec
from loraplex_registry.wire.client import ArtifactClient, ArtifactDamagedError, ArtifactError

_WEIGHTS = "adapter_model.safetensors"
_FILES = ("adapter_config.json", _WEIGHTS, "chat_template.jinja")
"""The files that the digest is made of; the others of a version stay in the registry."""

DEFAULT_MAX_BYTES = 10 << 30


@dataclass(frozen=True, slots=True)
class VerifiedAdapter:
    """An adapter whose bytes were proven to have its digest; seconds spent on it."""

    plan: AdapterPlan
    weights: Path
    fetch_s: float
    verify_s: float


class AdapterDisk:
    """Adapter files by digest, fetched on demand."""

    def __init__(
        self,
        root: Path,
        base: BaseSpec,
        client: ArtifactClient | None,
        tolerated: Collection[str] = (),
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Open the cache below `root`.

        Args:
            root: a folder that nothing else is in.
            base: the base that adapters are judged against.
            client: the registry's artifacts; None: only what is here already can be had.
            tolerated: checks that may fail (test hooks only).
            max_bytes: cap of all files.
        """
        self.cache = FolderCache(root, max_bytes)
        self._base = base
        self._client = client
        self._tolerated = tolerated

    @contextmanager
    def hold(self, digest: str) -> Iterator[VerifiedAdapter]:
        """Have the verified adapter, fetched if it is not here; its files stay until the end.

        A copy that fails, or that another process pushed out under our eyes, is fetched once more.

        Raises:
            DigestMismatchError: The registry's bytes do not have this digest, or the base refuses them.
            ArtifactError: The registry does not answer or has no such artifact.
            NoRoomError: It does not fit into the cache.
            OSError: The disk fails or is full.
        """
        with self.cache.hold(digest) as folder:
            yield self._get(digest, folder)

    def put(self, source: Path) -> str:
        """Take in a folder's files as if the registry had sent them (test hooks); returns their digest.

        Raises:
            DigestMismatchError: The base refuses them.
            NoRoomError: They do not fit into the cache.
            OSError: They cannot be read or copied.
        """
        files = [source / name for name in _FILES if (source / name).is_file()]
        with self.cache.stage(sum(file.stat().st_size for file in files)) as staged:
            for file in files:
                shutil.copyfile(file, staged / file.name)
            digest = self._judge("of the folder", staged).digest
            self.cache.publish(digest, staged)
        return digest

    def _get(self, digest: str, folder: Path) -> VerifiedAdapter:
        try:
            return self._get_once(digest, folder)
        except (DigestMismatchError, FileNotFoundError):
            self.cache.remove(digest)
            return self._get_once(digest, folder)

    def _get_once(self, digest: str, folder: Path) -> VerifiedAdapter:
        if not folder.is_dir():
            return self._fetch(digest, folder)
        started_at = time.monotonic()
        plan = self._check(digest, folder)
        return VerifiedAdapter(plan, folder / _WEIGHTS, 0.0, time.monotonic() - started_at)

    def _fetch(self, digest: str, folder: Path) -> VerifiedAdapter:
        if self._client is None:
            raise ArtifactError("this engine has no registry to fetch adapters from; start it with --registry-url")
        started_at = time.monotonic()
        files = [file for file in self._client.manifest(digest).files if file.name in _FILES]
        with self.cache.stage(sum(file.size for file in files)) as staged:
            for file in files:
                if self._client.fetch_file(digest, file.name, staged / file.name) != file.size:
                    raise ArtifactDamagedError(f"A file of {digest} is not as long as its manifest says")
                sync(staged / file.name)
            fetched_at = time.monotonic()
            plan = self._check(digest, staged)
            self.cache.publish(digest, staged)
        return VerifiedAdapter(plan, folder / _WEIGHTS, fetched_at - started_at, time.monotonic() - fetched_at)

    def _check(self, digest: str, folder: Path) -> AdapterPlan:
        plan = self._judge(digest, folder)
        if plan.digest != digest:
            raise DigestMismatchError(f"The registry's bytes for {digest} have the digest {plan.digest}.")
        return plan

    def _judge(self, which: str, folder: Path) -> AdapterPlan:
        # the registry has judged the base's name, perhaps overruled by an admin; the digest binds its fingerprint
        files = {name: folder / name for name in _FILES if (folder / name).exists()}
        report, plan = check_adapter(
            files, self._base, forced_base=True, tolerated=self._tolerated, renders_template=False
        )
        if plan is None:
            reasons = "; ".join(check.message for check in report.checks if check.verdict == "fail")
            raise DigestMismatchError(f"The adapter {which} does not fit this base: {reasons}")
        return plan
