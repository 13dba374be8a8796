"""One step as data: what the scheduler plans, what the runner returns. The only coupling of the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from loraplex_engine.core.request import Request
from loraplex_engine.wire.messages import PromptScores, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


NO_POSITIONS = range(0)


class PlannedRow(NamedTuple):
    """Tokens [start, start + num_tokens) of one request; `samples` when its next token is wanted of the last."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    scored: range = NO_POSITIONS
    """Positions whose logits say how likely the prompt's next token is."""

    @property
    def stop(self) -> int:
        """First position after this row's tokens."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """The rows of one forward pass, in batch order; `ended` are requests that turned out to be unable to run."""

    rows: list[PlannedRow]
    ended: list[TokenEvent] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """KV blocks (from, to) to copy before the pass: copy on write of blocks that requests share."""

    @cached_property
    def num_tokens(self) -> int:
        """T, tokens in the step."""
        return sum([row.num_tokens for row in self.rows])

    @cached_property
    def num_adapters(self) -> int:
        """Distinct digests in the step, the base not counted."""
        return len({row.request.digest for row in self.rows} - {None})

    @cached_property
    def is_decoding(self) -> bool:
        """Whether all that the step does is to give each of its requests the next token."""
        return self.num_tokens == len(self.rows) and all(row.samples and not row.scored for row in self.rows)

    def count_adapter_rows(self) -> dict[str, int]:
        """Tokens that each digest acts on; the base alone computes those before an invocation."""
        counts: dict[str, int] = {}
        for request, start, num_tokens, _, _ in self.rows:
            digest = request.digest
            if digest is not None and start + num_tokens > request.adapter_start:
                num_adapted = start + num_tokens - max(start, request.adapter_start)
                counts[digest] = counts.get(digest, 0) + num_adapted
        return counts


@dataclass(slots=True)
class StepResult:
    """What came out of a plan, by request id.

    `sampled` has a token for each row that samples; `invalid` the requests whose logits were not finite; `logits`
    float32 [num_tokens, V] for rows whose request wants them; `num_base_gemms` counts the layers' products.
    """

    sampled: dict[str, int]
    invalid: frozenset[str] = frozenset()
    logits: dict[str, Tensor] = field(default_factory=dict)
    num_base_gemms: int = 0
    model_s: float = 0.0
    """Seconds of the forward pass, the head and the choice of tokens; what else a step takes is the host's."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Of the tokens in `sampled` whose requests asked for them."""
    prompt_logprobs: dict[str, PromptScores] = field(default_factory=dict)
    """Of the prompt tokens that follow the positions which `PlannedRow.scored` names."""
    late: frozenset[str] = frozenset()
    """Requests that got no token, since their guides were not done; their last position is to be computed again."""
    vouched: frozenset[str] = frozenset()
    """Requests that computed a part of their prompt, and of which every hidden state in this step is finite."""
