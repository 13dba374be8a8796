"""What the sampling ops are told of each row, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_IDS = torch.empty(0, dtype=torch.int64)
NO_VALUES = torch.empty(0, dtype=torch.float32)
NO_WORDS = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True)
class SamplingRow:
    """How one row's token is chosen. The tensors are on the CPU; ids are within the vocabulary."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    number: float = 0.0
    """Where the token lies on the cumulative distribution, in [0, 1)."""
    num_top: int | None = None
    """Log-probabilities to tell beside that of the chosen token; None: tell none."""
    edit_ids: Tensor = NO_IDS  # int64, with
    edit_values: Tensor = NO_VALUES  # float32, added to their scores; -inf forbids
    seen_ids: Tensor = NO_IDS  # int64, distinct tokens that are penalised, with
    seen_counts: Tensor = NO_VALUES  # float32, how often each is in the output; 0: in the prompt alone
    allowed: Tensor = (
        NO_WORDS  # int32 [ceil(V / 32)], token t may be chosen if bit t % 32 of word t // 32 is set; []: all
    )

    @property
    def is_ordered(self) -> bool:
        """Whether its tokens are walked in falling order of score, not in order of id."""
        return self.top_k > 0 or self.top_p < 1.0


class Chosen(NamedTuple):
    """The tokens of Q rows. N is the largest `num_top`; a row that wants fewer has its own first."""

    token_ids: Tensor  # [Q] int64; -1 where the row has no token, since its scores are not finite
    logprobs: Tensor  # [Q, 1 + N] float32, of the token, then of the likeliest; [Q, 0] where no row wants any
    top_ids: Tensor  # [Q, N] int64, likeliest first, lower ids first among equals; any id where the value is -inf


class Scored(NamedTuple):
    """What Q rows say of a token each. N is `num_top`, the vocabulary's size at most."""

    logprobs: Tensor  # [Q, 1 + N] float32, of the token, then of the likeliest; NaN first: the scores are not finite
    top_ids: Tensor  # [Q, N] int64, likeliest first, lower ids first among equals; any id where the value is -inf
