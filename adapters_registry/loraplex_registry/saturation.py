"""Measures how much of its rank a stored LoRA uses, in a process of its own; changes nothing.

The stored bytes are copied to private staging, verified on the way, and measured there: one adapter at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.lookup import find_live, find_version, get_adapter, list_states
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import build_spec, find_main_target
from loraplex_registry.db.database import Database
from loraplex_registry.db.model import AdapterRow, VersionRow
from loraplex_registry.errors import ArtifactMissingError, ConflictError, NotFoundError, RetiredError
from loraplex_registry.peft.file_rule import CONFIG_FILE, WEIGHTS_FILE
from loraplex_registry.peft.saturation_process import SaturationAnswer, SaturationJob
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.storage.store import Store
from loraplex_registry.storage.verified import VerifiedReader
from loraplex_registry.wire.adapter import ManifestFile
from loraplex_registry.wire.full import Measured

_MODULE = "loraplex_registry.peft.saturation_process"
_NEEDED = (CONFIG_FILE, WEIGHTS_FILE)
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
_TIMEOUT_S = 60.0
_MAX_BYTES = 4 << 30
_TOO_LARGE = "The adapter is larger than what is measured here."
_NO_ANSWER = "The figures could not be computed within the limits of time and memory."


class _StoredFile(ManifestFile, frozen=True):
    """A file as a version's row describes it."""

    place: str


class Saturations:
    """Measures versions on request."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        self._turns = asyncio.Semaphore(1)

    async def measure(self, tenant: TenantRef, adapter: str, number: int | None) -> Measured:
        """Measure a LoRA of an adapter: version `number`, or the one with the most weight at `live`.

        Raises:
            NotFoundError: There is no such adapter or version.
            ConflictError: It is no LoRA, or none is live.
            RetiredError: Its bytes are gone.
            StoreUnavailableError: They cannot be read.
        """
        async with self._database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            version = await _choose(session, row, number)
            job = SaturationJob({}, build_spec(row.base), version.digest)
            files = msgspec.convert(version.files, tuple[_StoredFile, ...])
        found = Measured(adapter_id=str(row.id), base=row.base.name, version=version.number, digest=version.digest)
        answer = await self._answer(job, [file for file in files if file.name in _NEEDED])
        return msgspec.structs.replace(found, saturation=answer.saturation, problem=answer.problem)

    async def _answer(self, job: SaturationJob, files: list[_StoredFile]) -> SaturationAnswer:
        if sum(file.size for file in files) > _MAX_BYTES:
            return SaturationAnswer(problem=_TOO_LARGE)
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._turns:
                folder = await asyncio.to_thread(self._store.create_staging)
                try:
                    await asyncio.to_thread(self._copy, job.digest, files, folder)
                    paths = {file.name: str(folder / file.name) for file in files}
                    return await _run(msgspec.structs.replace(job, files=paths))
                finally:
                    await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
        except TimeoutError:
            return SaturationAnswer(problem=_NO_ANSWER)
        except ArtifactMissingError:
            return SaturationAnswer(problem="The adapter's files are not in the object store now; tell an admin.")

    def _copy(self, digest: str, files: list[_StoredFile], folder: Path) -> None:
        for file in files:
            reader = VerifiedReader(self._store.open(digest, file.place), digest, file)
            with contextlib.closing(reader), (folder / file.name).open("wb") as copy:
                while piece := reader.read():
                    copy.write(piece)


async def _choose(session: AsyncSession, adapter: AdapterRow, number: int | None) -> VersionRow:
    if number is None:
        number = find_main_target(await find_live(session, adapter.id))
        if number is None:
            ready = [
                one for one, state in (await list_states(session, [adapter.id]))[adapter.id].items() if state == "ready"
            ]
            number = max(ready, default=None)
    version = None if number is None else await find_version(session, adapter.id, number)
    if version is None:
        raise NotFoundError(
            f"{adapter.tenant}/{adapter.name} has no version {number or 'that is ready'}", param="version"
        )
    if version.kind != "lora":
        raise ConflictError(
            f"Version {version.number} is a full fine-tune; name the LoRA that falls short", param="version"
        )
    if version.state == "purged":
        raise RetiredError(f"Version {version.number} is purged: its bytes are gone", param="version")
    return version


async def _run(job: SaturationJob) -> SaturationAnswer:
    """Run the job in a process, which is gone when this returns."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        _MODULE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    try:
        answer, _ = await process.communicate(msgspec.json.encode(job))
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        return msgspec.json.decode(answer, type=SaturationAnswer)
    except UNREADABLE:
        return SaturationAnswer(problem=_NO_ANSWER)


def _environment() -> dict[str, str]:
    """Return no more than Python needs: the files of a tenant never meet a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
