"""What the core asks of the process that computes references, and what comes back."""

from __future__ import annotations

import msgspec

from loraplex_engine.lora.worker import WorkerLaunch


class ParityJob(msgspec.Struct, frozen=True):
    """Hold the logits of an adapter against the reference.

    The logits lie in the file that goes with the job, [rows, V] in `launch.dtype`: those of the adapter at each
    position of each prompt and then, with `has_base`, those of the base at the same positions.
    """

    launch: WorkerLaunch
    digest: str
    prompts: list[list[int]]
    has_base: bool


class Difference(msgspec.Struct, frozen=True):
    """How far logits are from others: the largest and the mean square's root of all, KL in nats: largest and mean."""

    largest: float
    rms: float
    max_kl: float
    mean_kl: float
    is_finite: bool = True


class ParityDone(msgspec.Struct, frozen=True, tag="done"):
    """The adapter against its reference, the base against its own, and what the adapter changes at all.

    `gain` is how much of that the engine changed; 1 is right.
    """

    adapter: Difference
    effect: Difference
    gain: float
    num_positions: int
    base: Difference | None = None


class ParityFailed(msgspec.Struct, frozen=True, tag="failed"):
    """There is no reference; the message may be told."""

    message: str


ParityOutcome = ParityDone | ParityFailed
