"""The tensors of one step, as the model and the ops read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from loraplex_engine.ops.lora.replacement import Replacements
    from loraplex_engine.ops.lora.segment import Segments
    from loraplex_engine.ops.lora.table import LoraTable


class AdapterRows(NamedTuple):
    """Which rows of a pass use which slot, and what the slots hold."""

    segments: Segments
    slots: tuple[int, ...]
    """The slots of `segments`, on the host."""
    table: LoraTable
    replacements: Replacements | None
    """None: no slot of these rows replaces anything of the base."""


class StepInputs(NamedTuple):
    """One forward pass over T tokens of Q requests.

    Rows of one request are contiguous and in position order: request q has tokens
    [query_start[q], query_start[q + 1]).
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cells: Tensor  # [T] int64, where each token's K and V go
    block_tables: Tensor  # [Q, max blocks] int32, padded with 0
    query_start: Tensor  # [Q + 1] int32
    context_len: Tensor  # [Q] int32, positions computed including this step
    adapters: AdapterRows | None  # None: no row has an adapter
