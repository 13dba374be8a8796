"""The loader process, `python -m loraplex_engine.lora.worker FD`: fetches, verifies and packs beside the step loop.

Runs at SCHED_IDLE and without torch, so that a load costs running streams next to nothing. FD is its end of a socket
pair: a WorkerLaunch and then jobs come in, results go out, each packed adapter as the descriptor of a nameless file.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loraplex_engine.core.module_group import find_place
from loraplex_engine.errors import DigestMismatchError
from loraplex_engine.lora.disk import AdapterDisk, VerifiedAdapter
from loraplex_engine.lora.packed import LoadDone, LoadFailed, LoadJob, PackedModule, plan_layout
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, TensorRef
from loraplex_registry.wire.client import ArtifactClient, ArtifactError, ArtifactMissingError

Loaded = tuple[LoadDone, int] | LoadFailed
"""A packed adapter with the descriptor of its file, or why there is none."""

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_MAX_LOADS = 4
_PATIENCE_S = 0.005
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there have no name


class WorkerLaunch(msgspec.Struct, frozen=True):
    """The first message of the core to the loader."""

    cache_dir: str
    base: BaseSpec
    dtype: str
    registry_url: str
    engine_key: str
    tolerated: tuple[str, ...] = ()
    """Checks that an adapter may fail; test hooks only."""


def main() -> int:
    """Serve load jobs until the core is gone."""
    core = Connection(int(sys.argv[1]))
    launch = msgspec.msgpack.decode(core.recv_bytes(), type=WorkerLaunch)
    become_background()
    client = ArtifactClient(launch.registry_url, launch.engine_key) if launch.registry_url else None
    disk = AdapterDisk(Path(launch.cache_dir) / "adapters", launch.base, client, launch.tolerated)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(core, lambda digest: load(digest, disk, launch.dtype))
    return 0


def serve(core: Connection[bytes, bytes], load_one: Callable[[str], Loaded]) -> None:
    """Take jobs and give results until the pipe ends; a few at a time, so that a slow download holds up no other."""
    pool = ThreadPoolExecutor(_MAX_LOADS)
    running: set[Future[Loaded]] = set()
    while True:
        if core.poll(_PATIENCE_S if running else None):
            job = msgspec.msgpack.decode(core.recv_bytes(), type=LoadJob)
            running.add(pool.submit(load_one, job.digest))
        for future in [future for future in running if future.done()]:
            running.discard(future)
            _tell(core, future.result())


def load(digest: str, disk: AdapterDisk, dtype: str) -> Loaded:
    """Bring one adapter from the registry or the disk cache into a packed file; whatever goes wrong is a result."""
    stage = "fetch"
    try:
        adapter = disk.get(digest)
        stage = "pack"
        return pack(digest, adapter, dtype)
    except DigestMismatchError as error:
        return LoadFailed(digest, "verify", error.code, str(error), is_content=True)
    except Exception as error:  # noqa: BLE001 - a load that fails must not end the others in this process
        _log.warning("%s could not be loaded: %r", digest, error)
        return LoadFailed(digest, stage, "adapter_loading", _explain(error), is_content=False)


def _explain(error: Exception) -> str:
    """Say why a load failed as a client may read it: no paths, no routes; the log has those."""
    if isinstance(error, ArtifactMissingError):
        return "The registry does not have this adapter's files."
    if isinstance(error, ArtifactError):
        return "The registry does not answer."
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"The adapter could not be loaded: {reason or type(error).__name__}"


def pack(digest: str, adapter: VerifiedAdapter, dtype: str) -> tuple[LoadDone, int]:
    """Write the adapter's matrices at exact ranks, in the model's dtype, to a nameless file in memory.

    Returns:
        The facts, and the file's descriptor, which the caller has to close.
    """
    started_at = time.monotonic()
    sizes = [(m.rank, m.a.shape[1], m.b.shape[0]) for m in adapter.plan.modules]
    offsets, num_bytes = plan_layout(sizes, itemsize=_ITEMSIZE[dtype])
    modules = _packed_modules(adapter.plan, offsets)
    with tempfile.TemporaryFile(dir=_memory_dir(num_bytes)) as packed, adapter.weights.open("rb") as file:
        packed.truncate(num_bytes)
        with (
            mmap.mmap(packed.fileno(), num_bytes) as target,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source,
        ):
            for module, (a_start, b_start) in zip(adapter.plan.modules, offsets, strict=True):
                _write(target, a_start, read_tensor(source, module.a), dtype)
                _write(target, b_start, read_tensor(source, module.b).T, dtype)
        descriptor = os.dup(packed.fileno())
    pack_s = time.monotonic() - started_at
    facts = LoadDone(digest, num_bytes, adapter.plan.rank, modules, adapter.fetch_s, adapter.verify_s, pack_s)
    return facts, descriptor


def read_tensor(source: mmap.mmap, ref: TensorRef) -> NDArray[np.float32]:
    """Return the tensor as float32, whatever it is stored as."""
    raw: NDArray[Any] = np.frombuffer(source[ref.start : ref.stop], dtype=_STORED[ref.dtype])
    values: NDArray[np.float32] = raw.astype(np.float32)
    if ref.dtype == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    return values.reshape(ref.shape)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even, as its bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def become_background() -> None:
    """Run only when the cores have nothing else to do, and not longer than the parent."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


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


def _write(target: mmap.mmap, start: int, values: NDArray[np.float32], dtype: str) -> None:
    data = to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values)
    target[start : start + data.nbytes] = data.tobytes()


def _packed_modules(plan: AdapterPlan, offsets: list[tuple[int, int]]) -> tuple[PackedModule, ...]:
    packed = []
    for module, (a_start, b_start) in zip(plan.modules, offsets, strict=True):
        place = find_place(module.path)
        if place is None:
            raise ValueError(f"the engine has no place for LoRA on {module.path}")
        packed.append(
            PackedModule(*place, module.rank, module.scaling, module.a.shape[1], module.b.shape[0], a_start, b_start)
        )
    return tuple(packed)


def _memory_dir(num_bytes: int) -> str | None:
    """The machine's memory file system when it has room, else the temporary folder."""
    try:
        stats = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return _SHARED_MEMORY if stats.f_bavail * stats.f_frsize > 2 * num_bytes else None


if __name__ == "__main__":
    sys.exit(main())
