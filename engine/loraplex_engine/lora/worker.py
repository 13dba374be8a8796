"""The loader process, `python -m loraplex_engine.lora.worker`: fetches, verifies and packs beside the step loop.

Runs at SCHED_IDLE and without torch, so that a load costs running streams next to nothing. Reads a
WorkerLaunch from stdin; dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from loraplex_engine.core.module_group import find_place
from loraplex_engine.errors import DigestMismatchError
from loraplex_engine.lora.disk import AdapterDisk, VerifiedAdapter
from loraplex_engine.lora.packed import LoadDone, LoadFailed, LoadJob, LoadResult, PackedModule, plan_layout
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, TensorRef
from loraplex_registry.wire.client import ArtifactClient, ArtifactError

_PR_SET_PDEATHSIG = 1


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What the core hands to the loader on its standard input."""

    endpoint: str
    cache_dir: str
    base: BaseSpec
    dtype: str
    registry_url: str
    engine_key: str


def main() -> int:
    """Serve load jobs until the parent ends."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerLaunch)
    become_background()
    client = ArtifactClient(launch.registry_url, launch.engine_key) if launch.registry_url else None
    disk = AdapterDisk(Path(launch.cache_dir) / "adapters", launch.base, client)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.bind(launch.endpoint)
    serve(socket, lambda digest: load(digest, disk, launch.dtype))
    return 0


def serve(socket: zmq.Socket[bytes], load_one: Callable[[str], LoadResult]) -> None:
    """Take jobs and give results for ever; a few at a time, so that one slow download holds up no other."""
    pool = ThreadPoolExecutor(_MAX_LOADS)
    running: set[Future[LoadResult]] = set()
    while True:
        if socket.poll(_PATIENCE_MS if running else None):
            job = msgspec.msgpack.decode(socket.recv(), type=LoadJob)
            running.add(pool.submit(load_one, job.digest))
        for future in [future for future in running if future.done()]:
            running.discard(future)
            socket.send(msgspec.msgpack.encode(future.result()))


def load(digest: str, disk: AdapterDisk, dtype: str) -> LoadResult:
    """Bring one adapter from the registry or the disk cache into a packed file."""
    stage = "fetch"
    try:
        adapter = disk.get(digest)
        stage = "pack"
        return pack(digest, adapter, dtype)
    except DigestMismatchError as error:
        return LoadFailed(digest, "verify", error.code, str(error), is_content=True)
    except (ArtifactError, OSError, ValueError) as error:
        return LoadFailed(
            digest, stage, "adapter_loading", f"The adapter could not be loaded: {error}", is_content=False
        )


def pack(digest: str, adapter: VerifiedAdapter, dtype: str) -> LoadDone:
    """Write the adapter's matrices at exact ranks, in the model's dtype, to a file in memory."""
    started_at = time.monotonic()
    sizes = [(m.rank, m.a.shape[1], m.b.shape[0]) for m in adapter.plan.modules]
    offsets, num_bytes = plan_layout(sizes, itemsize=_ITEMSIZE[dtype])
    fd, path = tempfile.mkstemp(prefix="loraplex-adapter-", dir=_memory_dir(num_bytes))
    try:
        os.ftruncate(fd, num_bytes)
        with mmap.mmap(fd, num_bytes) as target, adapter.weights.open("rb") as file:
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for module, (a_start, b_start) in zip(adapter.plan.modules, offsets, strict=True):
                _write(target, a_start, read_tensor(source, module.a), dtype)
                _write(target, b_start, read_tensor(source, module.b).T, dtype)
            source.close()
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    modules = _packed_modules(adapter.plan, offsets)
    pack_s = time.monotonic() - started_at
    return LoadDone(digest, path, num_bytes, adapter.plan.rank, modules, adapter.fetch_s, adapter.verify_s, pack_s)


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


_MAX_LOADS = 4
_PATIENCE_MS = 5
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files of mode 0600 whose names go as soon as they are mapped
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


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
