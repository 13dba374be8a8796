"""Verified adapter files on disk, by digest: the cache between the registry and host memory.

`AdapterDisk` is the only writer of `CACHE/adapters`. A folder appears by one rename after its canonical digest was
recomputed; what a former process left there is verified again before it is used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from loraplex_engine.errors import DigestMismatchError
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec
from loraplex_registry.wire.client import ArtifactClient, ArtifactError
from loraplex_registry.wire.digest import artifact_path

_WEIGHTS = "adapter_model.safetensors"
_FILES = ("adapter_config.json", _WEIGHTS, "chat_template.jinja")
"""The files that the digest is made of; the others of a version stay in the registry."""

_ABANDONED_S = 24 * 3600
_MAX_PLANS = 256


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
        self, root: Path, base: BaseSpec, client: ArtifactClient | None, tolerated: Collection[str] = ()
    ) -> None:
        """Use `root` for adapters of `base`; `tolerated` names checks that may fail (test hooks only)."""
        self._root = root
        self._base = base
        self._client = client
        self._tolerated = tolerated
        self._verified: dict[str, AdapterPlan] = {}
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()

    def get(self, digest: str) -> VerifiedAdapter:
        """Return the verified adapter, fetching it if it is not here; a copy that fails is fetched once more.

        Raises:
            DigestMismatchError: The registry's bytes do not have this digest, or the base refuses them.
            ArtifactError: The registry does not answer or has no such artifact.
        """
        folder = self._root / artifact_path(digest)
        try:
            return self._get_once(digest, folder)
        except DigestMismatchError:
            shutil.rmtree(folder, ignore_errors=True)
            return self._get_once(digest, folder)

    def put(self, source: Path) -> str:
        """Take in a folder's files as if the registry had sent them (test hooks); returns their digest.

        Raises:
            DigestMismatchError: The base refuses them.
            OSError: They cannot be read or copied.
        """
        with tempfile.TemporaryDirectory(dir=self._root, prefix=".fetch-") as temporary:
            target = Path(temporary) / "files"
            target.mkdir(mode=0o700)
            for name in _FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, target / name)
            plan = self._judge("of the folder", target)
            folder = self._root / artifact_path(plan.digest)
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not folder.exists():
                target.rename(folder)
        return plan.digest

    def _get_once(self, digest: str, folder: Path) -> VerifiedAdapter:
        fetch_s = self._fetch(digest, folder)
        started_at = time.monotonic()
        plan = self._verify(digest, folder)
        return VerifiedAdapter(plan, folder / _WEIGHTS, fetch_s, time.monotonic() - started_at)

    def _fetch(self, digest: str, folder: Path) -> float:
        if folder.is_dir():
            return 0.0
        if self._client is None:
            raise ArtifactError("this engine has no registry to fetch adapters from; start it with --registry-url")
        started_at = time.monotonic()
        self._verified.pop(digest, None)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=self._root, prefix=".fetch-") as temporary:
            target = Path(temporary) / "files"
            target.mkdir(mode=0o700)
            present = {file.name for file in self._client.manifest(digest).files}
            for name in present.intersection(_FILES):
                self._client.fetch_file(digest, name, target / name)
                _sync(target / name)
            self._remember(digest, self._check(digest, target))
            shutil.rmtree(folder, ignore_errors=True)
            target.rename(folder)
        _sync(folder.parent)
        return time.monotonic() - started_at

    def _sweep(self) -> None:
        """Remove what fetches left behind that were killed long ago; a younger one may still run."""
        for left in self._root.glob(".fetch-*"):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)

    def _verify(self, digest: str, folder: Path) -> AdapterPlan:
        plan = self._verified.get(digest)
        return plan if plan is not None else self._remember(digest, self._check(digest, folder))

    def _remember(self, digest: str, plan: AdapterPlan) -> AdapterPlan:
        while len(self._verified) >= _MAX_PLANS:
            self._verified.pop(next(iter(self._verified)), None)
        self._verified[digest] = plan
        return plan

    def _check(self, digest: str, folder: Path) -> AdapterPlan:
        plan = self._judge(digest, folder)
        if plan.digest != digest:
            raise DigestMismatchError(f"The registry's bytes for {digest} have the digest {plan.digest}.")
        return plan

    def _judge(self, which: str, folder: Path) -> AdapterPlan:
        # the registry has judged the base's name, perhaps overruled by an admin; the digest binds its fingerprint
        files = {name: folder / name for name in _FILES if (folder / name).exists()}
        report, plan = check_adapter(files, self._base, forced_base=True, tolerated=self._tolerated)
        if plan is None:
            reasons = "; ".join(check.message for check in report.checks if check.verdict == "fail")
            raise DigestMismatchError(f"The adapter {which} does not fit this base: {reasons}")
        return plan


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
