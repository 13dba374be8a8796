"""All layers of a decoder in one native call, where their parts have native forms: the bits of nine calls a layer.

Between the calls of a decode step Python takes as long as some of the calls do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loraplex_engine.core.inputs import StepInputs
from loraplex_engine.kv.cache import KVCache
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.ops.dispatch import select_kernels
from loraplex_engine.ops.linear import OWN

if TYPE_CHECKING:
    from loraplex_engine.models.decoder import DecoderLayer

_OPS: Any = torch.ops.loraplex
_CLASSES: Any = torch.classes.loraplex


class FusedLayers:
    """The layers of one model as a native object that holds the same weights."""

    def __init__(self, layers: Sequence[DecoderLayer], config: ModelConfig, scale: float, cos_sin: Tensor) -> None:
        """Share the weights of layers that `can_fuse`.

        Args:
            layers: of the model, in order.
            config: the model's facts.
            scale: factor on the scores of attention.
            cos_sin: the angles of all positions.
        """
        linears = [linear for layer in layers for linear in layer.linears.values()]
        self._cos_sin = cos_sin
        self._layers = _CLASSES.Layers(
            [linear.packed for linear in linears],
            [linear.bias for linear in linears],
            [linear.out_features for linear in layers[0].linears.values()],
            [layer.window for layer in layers],
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
            scale,
        )

    def run(
        self,
        x: Tensor,
        residual: Tensor,
        gains: Sequence[Tensor],
        head_gains: Sequence[Tensor],
        inputs: StepInputs,
        kv: KVCache,
    ) -> Tensor:
        """Compute all layers for all rows.

        Args:
            x: normalised for the first layer, [T, E].
            residual: the stream beside it, updated in place, [T, E].
            gains: of each layer's norm after attention and of the norm that follows the layer; [E] or [T, E].
            head_gains: of each layer's norms of q and k, [D] or [T, D]; empty where the model has none.
            inputs: the rows.
            kv: the cache.

        Returns:
            The rows normalised for what follows the last layer, [T, E].
        """
        result: Tensor = _OPS.decoder_layers.default(
            self._layers, self._begin(inputs), x, residual, kv.k, kv.v, list(gains), list(head_gains)
        )
        return result

    def _begin(self, inputs: StepInputs) -> Any:
        """What all layers of one pass read, as a native object."""
        rows = [inputs.positions, inputs.cells, self._cos_sin]
        rows += [inputs.block_tables, inputs.query_start, inputs.context_len]
        if inputs.adapters is None:
            return _CLASSES.Pass(rows, [], 0)
        table, segments = inputs.adapters.table, inputs.adapters.segments
        adapters = [table.entries, table.scalings, table.occupied, table.features]
        adapters += [segments.token_indices, segments.starts, segments.slots]
        return _CLASSES.Pass(rows, adapters, table.max_rank)


def can_fuse(layers: Sequence[DecoderLayer], dtype: torch.dtype) -> bool:
    """Whether every part of the layers has its native form."""
    linears = [linear for layer in layers for linear in layer.linears.values()]
    return all(linear.form is OWN for linear in linears) and select_kernels("cpu", dtype).name == "native"
