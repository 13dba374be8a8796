"""The loader process, `python -m loraplex_engine.lora.worker FD`: fetches, verifies and packs beside the step loop.

Runs at SCHED_IDLE and without torch, so that a load costs running streams next to nothing. FD is its end of a socket
pair: a WorkerLaunch and then jobs come in, results go out, each packed adapter as the descriptor of a nameless file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

import msgspec

from loraplex_engine.errors import DigestMismatchError, LoadFailedError
from loraplex_engine.lora.base_weights import BaseUnreadableError, BaseWeights
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.folder_cache import FolderCache
from loraplex_engine.lora.pack import UnservableAdapterError, pack
from loraplex_engine.lora.packed import LoadBeat, LoadDone, LoadFailed, LoadJob
from loraplex_engine.lora.stored import ShortFileError
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.wire.client import ArtifactClient, ArtifactDamagedError, ArtifactError, ArtifactMissingError

Loaded = tuple[LoadDone, int] | LoadFailed
"""A packed adapter with the descriptor of its file, or why there is none."""

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_MAX_LOADS = 4
_PATIENCE_S = 0.005
_BEAT_S = 1.0


class WorkerLaunch(msgspec.Struct, frozen=True):
    """The first message of the core to the loader."""

    cache_dir: str
    base: BaseSpec
    base_dir: str
    dtype: str
    registry_url: str
    engine_key: str
    max_disk_bytes: int
    tolerated: tuple[str, ...] = ()
    """Checks that an adapter may fail; test hooks only."""


def main() -> int:
    """Serve load jobs until the core is gone."""
    core = Connection(int(sys.argv[1]))
    launch = msgspec.msgpack.decode(core.recv_bytes(), type=WorkerLaunch)
    become_background()
    client = ArtifactClient(launch.registry_url, launch.engine_key) if launch.registry_url else None
    root = Path(launch.cache_dir) / "adapters"
    disk = AdapterDisk(root, launch.base, client, launch.tolerated, launch.max_disk_bytes)
    base = BaseWeights(Path(launch.base_dir), launch.base, launch.dtype)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(core, lambda digest: load(digest, disk, base))
    return 0


def serve(core: Connection[bytes, bytes], load_one: Callable[[str], Loaded]) -> None:
    """Take jobs and give results until the pipe ends; a few at a time, so that a slow download holds up no other.

    While there are jobs the core hears every second that this still runs.
    """
    pool = ThreadPoolExecutor(_MAX_LOADS)
    running: set[Future[Loaded]] = set()
    beat_at = 0.0
    while True:
        if core.poll(_PATIENCE_S if running else None):
            job = msgspec.msgpack.decode(core.recv_bytes(), type=LoadJob)
            running.add(pool.submit(load_one, job.digest))
        for future in [future for future in running if future.done()]:
            running.discard(future)
            _tell(core, future.result())
        if running and time.monotonic() >= beat_at:
            core.send_bytes(msgspec.msgpack.encode(LoadBeat()))
            beat_at = time.monotonic() + _BEAT_S


def load(digest: str, disk: AdapterDisk, base: BaseWeights) -> Loaded:
    """Bring one adapter from the registry or the disk cache into a packed file; whatever goes wrong is a result."""
    stage = "fetch"
    try:
        with disk.hold(digest) as adapter:
            stage = "pack"
            facts, descriptor = pack(digest, adapter, base)
        return _note_disk(facts, disk.cache), descriptor
    except DigestMismatchError as error:
        return LoadFailed(digest, "verify", error.code, str(error), is_content=True)
    except UnservableAdapterError as error:
        message = f"The adapter cannot be served: {error}."
        return LoadFailed(digest, stage, LoadFailedError.code, message, is_content=True)
    except Exception as error:  # noqa: BLE001 - a load that fails must not end the others in this process
        _log.warning("%s could not be loaded: %r", digest, error)
        return LoadFailed(digest, stage, LoadFailedError.code, _explain(error), is_content=False)


def _note_disk(facts: LoadDone, cache: FolderCache) -> LoadDone:
    return msgspec.structs.replace(
        facts,
        disk_adapters=cache.num_folders,
        disk_bytes=cache.num_bytes,
        disk_evictions=cache.take_evictions(),
    )


def _explain(error: Exception) -> str:
    """Say why a load failed as a client may read it: no paths, no routes; the log has those."""
    if isinstance(error, ArtifactMissingError):
        return "The registry does not have this adapter's files."
    if isinstance(error, ArtifactDamagedError):
        return "What the registry sends of this adapter is damaged."
    if isinstance(error, ArtifactError):
        return "The registry does not answer."
    if isinstance(error, BaseUnreadableError):
        return "The base's weights on this replica cannot be read; they must be pulled again."
    if isinstance(error, ShortFileError):
        return "The adapter's file was cut short after it was verified."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The replica's disk is full."
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"The adapter could not be loaded: {reason or type(error).__name__}"


def become_background() -> None:
    """Run only when the cores have nothing else to do, and not longer than the parent."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(core: Connection[bytes, bytes], result: Loaded) -> None:
    if isinstance(result, LoadFailed):
        core.send_bytes(msgspec.msgpack.encode(result))
        return
    facts, descriptor = result
    try:
        core.send_bytes(msgspec.msgpack.encode(facts))
        send_handle(core, descriptor, None)  # the process id matters on Windows only
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
