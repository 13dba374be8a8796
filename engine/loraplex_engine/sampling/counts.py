"""The tokens of one request that penalties act on, with how often each is in its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class TokenCounts:
    """Distinct tokens of a prompt and an output that grows; a step costs as much as it has new tokens.

    The counts are of the output as the request has it, so it does not matter what was computed when, or again.
    """

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Begin with a prompt whose tokens count 0 times; at most `max_tokens` will follow."""
        self._index = {token_id: i for i, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.zeros(len(self._index) + max_tokens, dtype=np.int64)
        self._ids[: len(self._index)] = list(self._index)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_counted = 0

    def catch_up(self, output_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Count what the output has gained.

        Returns:
            The distinct tokens, int64 [n], and how often each is in the output, float32 [n]; valid until the next call.
        """
        for token_id in output_ids[self._num_counted :]:
            index = self._index.setdefault(token_id, len(self._index))
            self._ids[index] = token_id
            self._counts[index] += 1
        self._num_counted = len(output_ids)
        size = len(self._index)
        return torch.from_numpy(self._ids[:size]), torch.from_numpy(self._counts[:size])
