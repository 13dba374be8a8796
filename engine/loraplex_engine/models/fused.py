"""A decoder layer as one native call instead of nine, where all of its parts have native forms: the same bits.

Between the calls of a decode step Python takes as long as some of the calls do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loraplex_engine.core.inputs import StepInputs
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.ops.dispatch import select_kernels
from loraplex_engine.ops.linear import OWN

if TYPE_CHECKING:
    from loraplex_engine.models.decoder import DecoderLayer

_OPS: Any = torch.ops.loraplex
_CLASSES: Any = torch.classes.loraplex


def fuse(layers: Sequence[DecoderLayer], config: ModelConfig, dtype: torch.dtype, scale: float) -> list[Any] | None:
    """The layers as native objects that hold the same weights; None where a part of them has another form.

    Args:
        layers: of the model, in order.
        config: the model's facts.
        dtype: of its weights.
        scale: factor on the scores of attention.
    """
    linears = [linear for layer in layers for linear in layer.linears.values()]
    if any(linear.form is not OWN for linear in linears) or select_kernels("cpu", dtype).name != "native":
        return None
    return [
        _CLASSES.Layer(
            [linear.packed for linear in layer.linears.values()],
            [linear.bias for linear in layer.linears.values()],
            [linear.out_features for linear in layer.linears.values()],
            index,
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
            scale,
            layer.window,
        )
        for index, layer in enumerate(layers)
    ]


def begin_pass(inputs: StepInputs, cos_sin: Tensor) -> Any:
    """What all layers of one pass read, as a native object."""
    rows = [inputs.positions, inputs.cells, cos_sin, inputs.block_tables, inputs.query_start, inputs.context_len]
    if inputs.adapters is None:
        return _CLASSES.Pass(rows, [], 0)
    table, segments = inputs.adapters.table, inputs.adapters.segments
    adapters = [table.entries, table.scalings, table.occupied, table.features]
    return _CLASSES.Pass(rows, [*adapters, segments.token_indices, segments.starts, segments.slots], table.max_rank)


def run_layer(
    layer: Any,
    shared: Any,
    x: Tensor,
    residual: Tensor,
    kv: tuple[Tensor, Tensor],
    gains: tuple[Tensor, Tensor],
    head_gains: Sequence[Tensor],
) -> Tensor:
    """Compute one layer for all rows.

    Args:
        layer: of `fuse`.
        shared: of `begin_pass`.
        x: normalised for this layer, [T, E].
        residual: the stream beside it, updated in place, [T, E].
        kv: the layer's K and V cache.
        gains: of the norm after attention, and of the norm that follows the layer; [E] or [T, E].
        head_gains: of the norms of q and k, [D] or [T, D]; none where the model has none.

    Returns:
        The rows normalised for the next layer, [T, E].
    """
    result: Tensor = _OPS.decoder_layer.default(layer, shared, x, residual, *kv, *gains, list(head_gains))
    return result
