"""What an adapter changes beside the linears of the layers: the embedding, the head, the gains of norms.

Each function leaves rows alone whose slot changes nothing there. Loops over slots in Python: few adapters do any of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.module_group import EMBEDDING_GROUP, HEAD_GROUP
from loraplex_engine.ops.linear import plain_linear
from loraplex_engine.ops.lora.lora import lora_add, lora_expand


def own_gain(path: str, gain: Tensor, inputs: StepInputs) -> Tensor:
    """The gain of a norm for each row.

    Args:
        path: the norm's module path.
        gain: the base's, [E].
        inputs: of the step, T rows.

    Returns:
        `gain` itself where no row has its own, else [T, E].
    """
    adapters = inputs.adapters
    if adapters is None or adapters.replacements is None:
        return gain
    slot_to_gain = adapters.replacements.find_norms(path, adapters.slots)
    if not slot_to_gain:
        return gain
    gains = gain.repeat(len(inputs.token_ids), 1)
    for slot, rows in adapters.segments.spans():
        if slot in slot_to_gain:
            gains[rows] = slot_to_gain[slot]
    return gains


def adapt_embedding(x: Tensor, token_ids: Tensor, adapters: AdapterRows) -> None:
    """Give rows the embedding of their adapter, in place: replaced rows first, LoRA on top.

    Args:
        x: embedded tokens by the base, [T, E].
        token_ids: [T] int64.
        adapters: which row uses which adapter.
    """
    if adapters.replacements is not None:
        slot_to_own = adapters.replacements.find_rows(EMBEDDING_GROUP, adapters.slots)
        for slot, rows in adapters.segments.spans():
            if (own := slot_to_own.get(slot)) is not None:
                found, own_rows = own.find(token_ids[rows])
                x[rows[found]] = own.rows[own_rows]
    if adapters.table.targets(EMBEDDING_GROUP, 0, adapters.slots):
        ranks = _embedding_ranks(token_ids, adapters)
        lora_expand(ranks, x, adapters.table, 0, EMBEDDING_GROUP, adapters.segments)


def adapt_scores(scores: Tensor, hidden: Tensor, adapters: AdapterRows) -> None:
    """Give rows the scores of their adapter's head, in place: replaced rows of the head first, LoRA on top.

    Args:
        scores: of the base's head, [Q, V] in the model's dtype.
        hidden: what the head reads, [Q, E].
        adapters: which of the Q rows uses which adapter.
    """
    if adapters.replacements is not None:
        slot_to_own = adapters.replacements.find_rows(HEAD_GROUP, adapters.slots)
        for slot, rows in adapters.segments.spans():
            if (own := slot_to_own.get(slot)) is None:
                continue
            own_scores = plain_linear(hidden[rows], own.rows)
            if own.token_ids is None:
                scores[rows] = own_scores
            else:
                scores[rows[:, None], own.token_ids] = own_scores
    if adapters.table.targets(HEAD_GROUP, 0, adapters.slots):
        lora_add(hidden, scores, adapters.table, 0, HEAD_GROUP, adapters.segments)


def _embedding_ranks(token_ids: Tensor, adapters: AdapterRows) -> Tensor:
    """What shrink would return for one-hot rows: the token's row of A, [T_lora, max_rank]."""
    table, segments = adapters.table, adapters.segments
    wide = torch.float64 if table.dtype is torch.float64 else torch.float32
    ranks = torch.zeros(segments.num_rows, table.width(EMBEDDING_GROUP), dtype=wide, device=token_ids.device)
    begin = 0
    for slot, rows in segments.spans():
        module = table.find_module(slot, 0, EMBEDDING_GROUP, 0)
        if module is not None and module.a is not None:
            ranks[begin : begin + len(rows), : module.rank] = module.a[token_ids[rows]].to(wide)
        begin += len(rows)
    return ranks
