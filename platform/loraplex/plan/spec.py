"""What is asked of a plan: a model, adapters, a card, and the engine's flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loraplex.errors import InvalidRequestError
from loraplex.plan.adapter import AdapterGroup, check_group

Dtype = Literal["bfloat16", "float16", "float32"]
KvDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
DTYPE_TO_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
MAX_GROUPS = 1000


class PlanSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question to the planner. Flags are named as the engine's, lengths in tokens.

    `model` is a preset's name, or what `config` (the content of a `config.json`) is called. `gpu` is a card's name or a
    size such as `24GiB`. `max_model_len` None: the model's own. `max_loras` None: 8, or fewer if there are fewer
    adapters. `overhead_bytes` is what the process holds on a card beside all that is counted here: driver, libraries,
    fragments; it is assumed, not computed.
    """

    model: str = "llama-3.1-8b"
    config: dict[str, Any] | None = None
    adapters: Sequence[AdapterGroup] = ()
    gpu: str = "h100-80g"
    gpu_memory_utilization: float = 0.90
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_loras: int | None = None
    dtype: Dtype = "bfloat16"
    kv_cache_dtype: KvDtype = "auto"
    block_size: int = 16
    overhead_bytes: int = 1 << 30


RANGES: tuple[tuple[str, float, float], ...] = (
    ("gpu_memory_utilization", 0.01, 1.0),
    ("max_model_len", 1, 1 << 24),
    ("max_num_seqs", 1, 1 << 16),
    ("max_num_batched_tokens", 1, 1 << 24),
    ("max_loras", 0, 1 << 20),
    ("block_size", 1, 1024),
    ("overhead_bytes", 0, 1 << 40),
)


def check_spec(spec: PlanSpec) -> None:
    """Refuse a question whose numbers make no sense.

    Raises:
        InvalidRequestError: The message names the field and its range.
    """
    for name, low, high in RANGES:
        value = getattr(spec, name)
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}, but must be from {low:,} to {high:,}.", param=name)
    if len(spec.adapters) > MAX_GROUPS:
        raise InvalidRequestError(f"There are more than {MAX_GROUPS} groups of adapters.", param="adapters")
    for group in spec.adapters:
        check_group(group)
