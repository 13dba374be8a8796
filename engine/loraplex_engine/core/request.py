"""One generation in the engine.

`Request` is written by the scheduler alone (tokens, progress, blocks, slot). It has no phase: a request simply has more
tokens than computed ones, and each step catches up some of the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex_engine.core.guide import Guide
from loraplex_engine.wire.messages import PromptScores, RequestStats, SamplingParams

NO_SLOT = -1
"""Slot of rows that use the base alone."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A generation: what was asked, what has been computed, what it holds.

    `num_computed` counts tokens whose K and V lie in the request's blocks. Instants are monotonic seconds.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    digest: str | None = None
    tenant_id: str = ""
    priority: int = 0
    """Lower goes first, among the tenant's."""
    deadline_at: float = float("inf")
    cache_salt: str = ""
    """Prefixes are shared among a tenant's requests of one salt only."""
    arrived_at: float = 0.0
    wants_logits: bool = False
    """Keep the logits of every prompt position (`Engine.score`); such a request skips cached prefixes."""
    is_lone: bool = False
    """Compute it in a step of its own, from no cached prefix and for none; its prompt must fit into one step."""
    max_chunk: int = 1 << 30
    """Most of its tokens that one step computes."""
    adapter_start: int = 0
    """Position of the first token that the adapter acts on; the base alone computes those before."""
    guide: Guide | None = None
    """What its output must match; None: anything."""
    weight: float = 1
    """The tenant's share of the engine over that of a tenant of weight 1."""

    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens that it did not have to compute, since others had."""
    num_scored: int = 0
    """Prompt tokens, the first excepted, whose log-probabilities are known, where it asks for them."""
    prompt_logprobs: list[PromptScores] = field(default_factory=list)
    """Those that no event has told yet, part by part."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of its full blocks, as far as they were needed."""
    num_finite: int = 0
    """Computed tokens that numbers seen since vouch for: only those are for others."""
    num_published: int = 0
    """Blocks that others can find."""
    num_charged: int = 0
    """Prompt tokens that its tenant has been charged for; what is computed again is not charged again."""
    slot: int = NO_SLOT
    preemptions: int = 0

    arrival: int = 0
    """Place in the order of arrival; two requests never share one."""
    awaited: int | None = None
    """Index of the block that it waited for last, since another request computed it; from `prefix_wait_at` on."""
    prefix_wait_at: float = float("inf")
    load_wait_at: float | None = None
    load_s: float = 0.0
    load_bytes: int = 0
    """Of its adapter, as often as it was put into a slot for this request."""
    started_at: float | None = None
    turn_at: float = 0.0
    """When it started last, or last lost its place among those that run."""
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps have to catch up."""
        return self.num_tokens - self.num_computed

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt_ids) - 1

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that this request can reach."""
        return len(self.prompt_ids) + self.params.max_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop)."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: stop - num_prompt]

    def stats(self, now: float) -> RequestStats:
        """What the request has cost up to `now`."""
        started_at = now if self.started_at is None else self.started_at
        first_at = now if self.first_token_at is None else self.first_token_at
        return RequestStats(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.num_cached,
            completion_tokens=len(self.output_ids),
            queue_s=max(0.0, started_at - self.arrived_at - self.load_s),
            prefill_s=max(0.0, first_at - started_at),
            load_s=self.load_s,
            decode_s=max(0.0, now - first_at),
            preemptions=self.preemptions,
            load_bytes=self.load_bytes,
        )
