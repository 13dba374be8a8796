"""Weights of the base that a slot's adapter replaces: gains of norms, rows of the embedding, rows of the head.

`Replacements` is written by the bank only and read by the model; it keeps its tensors alive. Most slots hold none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, HEAD_GROUP


class RowsReplacement:
    """Rows of the embedding or head."""

    def __init__(self, rows: Tensor, token_ids: Tensor | None) -> None:
        self.rows = rows
        """[n, E] in the model's dtype"""
        self.token_ids = token_ids
        """[n] int64, all different; None: every row of the vocabulary, in order."""
        self._sorted = None if token_ids is None else token_ids.sort()

    def find(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where replaced tokens stand in `token_ids` [T], and at which of `rows` each of them has its own."""
        if self._sorted is None:
            return torch.arange(len(token_ids), device=token_ids.device), token_ids
        known, order = self._sorted
        places = torch.searchsorted(known, token_ids).clamp(max=len(known) - 1)
        found = torch.nonzero(known[places] == token_ids).squeeze(1)
        return found, order[places[found]]


class Replacements:
    """What each slot replaces; knows slots, no digests."""

    def __init__(self, num_slots: int) -> None:
        self._norms: list[dict[str, Tensor]] = [{} for _ in range(num_slots)]
        self._rows: list[dict[str, RowsReplacement]] = [{} for _ in range(num_slots)]

    def set_norm(self, slot: int, path: str, gain: Tensor) -> None:
        """Let a slot use its own gain for a norm.

        Args:
            slot: in [0, N).
            path: the norm's module path, such as `model.layers.0.input_layernorm` or `model.norm`.
            gain: [width] in the model's dtype.
        """
        self._norms[slot][path] = gain

    def set_rows(self, slot: int, group: str, rows: Tensor, token_ids: Tensor | None) -> None:
        """Let a slot use its own rows of the embedding or the head.

        Args:
            slot: in [0, N).
            group: `EMBEDDING_GROUP` or `HEAD_GROUP`.
            rows: [n, E] in the model's dtype.
            token_ids: [n] int64, all different, or None: n is the vocabulary.
        """
        assert group in (EMBEDDING_GROUP, HEAD_GROUP)
        self._rows[slot][group] = RowsReplacement(rows, token_ids)

    def clear(self, slot: int) -> None:
        """Let go of a slot's tensors. No step that uses the slot may be running."""
        self._norms[slot] = {}
        self._rows[slot] = {}

    def find_norms(self, path: str, slots: Iterable[int]) -> dict[int, Tensor]:
        """Slot to its own gain of a norm, for those of `slots` that have one."""
        return {slot: self._norms[slot][path] for slot in slots if path in self._norms[slot]}

    def find_rows(self, group: str, slots: Iterable[int]) -> dict[int, RowsReplacement]:
        """Slot to its own rows of the embedding or head, for those of `slots` that have some."""
        return {slot: self._rows[slot][group] for slot in slots if group in self._rows[slot]}

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether any of the slots replaces something."""
        return any(self._norms[slot] or self._rows[slot] for slot in slots)
