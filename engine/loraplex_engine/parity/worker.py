"""The process that computes a reference, started by `ReferenceProcess` with FD as its argument: one job, then it ends.

Runs at SCHED_IDLE, one thread, without torch. FD is its end of a socket pair: a ParityJob and the descriptor of the
engine's logits come in, a ParityOutcome goes out. It holds some rows of a matrix at a time and logits of some tokens.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loraplex_engine.lora.disk import AdapterDisk, VerifiedAdapter
from loraplex_engine.lora.stored import ShortFileError
from loraplex_engine.lora.worker import WorkerLaunch, become_background
from loraplex_engine.models.config import load_config
from loraplex_engine.parity.compare import Comparison, Gain
from loraplex_engine.parity.job import Difference, ParityDone, ParityFailed, ParityJob, ParityOutcome
from loraplex_engine.parity.merged import MergedBase
from loraplex_engine.parity.prompts import find_start
from loraplex_engine.parity.reference import Reference
from loraplex_registry.wire.client import ArtifactClient, ArtifactError

_log = logging.getLogger(__name__)
_STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}


def main() -> int:
    """Do one job for the core."""
    core = Connection(int(sys.argv[1]))
    job = msgspec.msgpack.decode(core.recv_bytes(), type=ParityJob)
    descriptor = recv_handle(core)
    become_background()
    core.send_bytes(msgspec.msgpack.encode(_run(job, descriptor)))
    return 0


def _run(job: ParityJob, descriptor: int) -> ParityOutcome:
    try:
        with _open_disk(job.launch).hold(job.digest) as adapter:
            return measure(job, adapter, _map_logits(job, descriptor))
    except ArtifactError:
        return ParityFailed("The adapter's files are gone from this replica, and the registry does not answer.")
    except (OSError, ShortFileError, MemoryError) as error:
        _log.warning("no reference for %s: %r", job.digest, error)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return ParityFailed(f"The reference could not be computed: {reason or type(error).__name__}")


def _open_disk(launch: WorkerLaunch) -> AdapterDisk:
    client = ArtifactClient(launch.registry_url, launch.engine_key) if launch.registry_url else None
    root = Path(launch.cache_dir) / "adapters"
    return AdapterDisk(root, launch.base, client, launch.tolerated, launch.max_disk_bytes)


def _map_logits(job: ParityJob, descriptor: int) -> NDArray[Any]:
    """The engine's logits as they lie in its file, [rows, V]; bfloat16 as its bits."""
    try:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    num_rows = sum(map(len, job.prompts)) * (2 if job.has_base else 1)
    return np.frombuffer(mapped, _STORED[job.launch.dtype]).reshape(num_rows, -1)


def measure(job: ParityJob, adapter: VerifiedAdapter, logits: NDArray[Any]) -> ParityDone:
    """Compute the reference and hold the logits against it.

    The first position of a prompt is left out: a language model keeps values of thousands there, at which two correct
    implementations are further from each other in bfloat16 than a broken adapter is anywhere else.
    """
    base_dir, base, plan = Path(job.launch.base_dir), job.launch.base, adapter.plan
    starts = [find_start(prompt, plan.invocation_ids) for prompt in job.prompts]
    nowhere = [len(prompt) for prompt in job.prompts]
    positions = np.concatenate([np.arange(len(prompt)) for prompt in job.prompts])
    rows, num_rows = np.flatnonzero(positions > 0), len(positions)
    own, plain, effect = (Comparison(len(rows)) for _ in range(3))
    gain = Gain()
    with MergedBase(base_dir, base, plan, adapter.weights) as merged:
        reference = Reference(load_config(base_dir), merged, [*job.prompts, *job.prompts], [*starts, *nowhere])
        for span, expected in reference.compute_logits(reference.compute_hidden()):
            expected_own, expected_plain = expected[rows], expected[num_rows + rows]
            answered = _widen(logits[rows, span])
            own.add(expected_own, answered)
            gain.add(expected_plain, expected_own, answered)
            effect.add(expected_plain, expected_own)
            if job.has_base:
                plain.add(expected_plain, _widen(logits[num_rows + rows, span]))
    base_difference = _describe(plain) if job.has_base else None
    return ParityDone(_describe(own), _describe(effect), gain.value, len(rows), base_difference)


def _widen(stored: NDArray[Any]) -> NDArray[np.float32]:
    if stored.dtype == np.float32:
        return stored
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _describe(comparison: Comparison) -> Difference:
    return Difference(
        comparison.logit_difference, comparison.rms, comparison.max_kl, comparison.mean_kl, comparison.is_finite
    )
