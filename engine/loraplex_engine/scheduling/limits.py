"""What bounds a step and a wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens, requests and seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    queue_timeout_s: float
    adapter_load_timeout_s: float
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    """Requests that may wait; the next one is told that the queue is full."""
