"""The forward pass of a Llama-like decoder over T rows of many requests, adapters applied beside each fused linear.

`Decoder` owns the packed weights and counts its calls of base linears; only `rope_and_store` writes the KV cache. It
knows rows, cells and slots, neither requests nor adapters' names.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.module_group import EMBEDDING_GROUP, HEAD_GROUP, LAYER_GROUPS
from loraplex_engine.kv.cache import KVCache
from loraplex_engine.models.adapted import adapt_embedding, adapt_scores, own_gain
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.fused import FusedLayers, can_fuse
from loraplex_engine.models.layout import EMBEDDING, FINAL_NORM, HEAD, layer_path
from loraplex_engine.models.rope import build_cos_sin
from loraplex_engine.ops.activation import silu_and_mul
from loraplex_engine.ops.attention import paged_attention
from loraplex_engine.ops.linear import PackedLinear
from loraplex_engine.ops.lora.lora import lora_add
from loraplex_engine.ops.lora.table import GroupShape
from loraplex_engine.ops.norm import add_rms_norm, head_rms_norm, rms_norm
from loraplex_engine.ops.rotary import rope_and_store
from loraplex_engine.weights.source import WeightSource

LINEARS_PER_LAYER = len(LAYER_GROUPS)
_GROUP_FOLDER = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}


def lora_shapes(config: ModelConfig) -> dict[str, GroupShape]:
    """In- and output features of every group of linears, for the table of adapters."""
    hidden, inner, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    return {
        "qkv": GroupShape(hidden, (q_size, kv_size, kv_size)),
        "o": GroupShape(q_size, (hidden,)),
        "gate_up": GroupShape(hidden, (inner, inner)),
        "down": GroupShape(inner, (hidden,)),
        EMBEDDING_GROUP: GroupShape(config.vocab_size, (hidden,)),
        HEAD_GROUP: GroupShape(hidden, (config.vocab_size,)),
    }


class Norm(NamedTuple):
    """A norm of the base: its module path and its gain."""

    path: str
    gain: Tensor


class TensorReader:
    """Reads modules of one base into the model's dtype and device."""

    def __init__(self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.device = device

    def read_linear(self, layer: int, group: str) -> PackedLinear:
        """One group of a layer's linears as a single product, their rows one below the other."""
        paths = [layer_path(layer, f"{_GROUP_FOLDER[group]}.{leaf}") for leaf in LAYER_GROUPS[group]]
        bias = self._read_fused([f"{path}.bias" for path in paths]) if self._has_bias(group) else None
        return PackedLinear(self._read_fused([f"{path}.weight" for path in paths]), bias)

    def read_norm(self, path: str) -> Norm:
        """A norm; its gain is a copy, so that a few bytes do not keep a page of the mapping each."""
        return Norm(path, self.weights.read(f"{path}.weight", self.dtype).clone().to(self.device))

    def read_matrix(self, path: str) -> Tensor:
        """Embedding or head: a view of the mapping where the file has the model's dtype."""
        return self.weights.read(f"{path}.weight", self.dtype).to(self.device)

    def _read_fused(self, names: list[str]) -> Tensor:
        return self.weights.read_fused(names, self.dtype).to(self.device)

    def _has_bias(self, group: str) -> bool:
        by_group = {"qkv": self.config.has_qkv_bias, "o": self.config.has_o_bias}
        return by_group.get(group, self.config.has_mlp_bias)


class DecoderLayer:
    """The weights of one layer: four packed linears by group, and its norms."""

    def __init__(self, reader: TensorReader, layer: int) -> None:
        self.window = reader.config.windows[layer]
        self.linears = {group: reader.read_linear(layer, group) for group in LAYER_GROUPS}
        self.input_norm = reader.read_norm(layer_path(layer, "input_layernorm"))
        self.post_norm = reader.read_norm(layer_path(layer, "post_attention_layernorm"))
        names = ("q_norm", "k_norm") if reader.config.has_qk_norm else ()
        self.head_norms = [reader.read_norm(layer_path(layer, f"self_attn.{name}")) for name in names]


class Decoder:
    """A whole model.

    Args:
        config: Its facts.
        weights: Its tensors; linears are packed into memory of our own, the embedding stays a view where the file has
            the model's dtype.
        dtype: Of weights, activations and KV: float32, bfloat16, or float64 for the ground truth of tests.
        device: Where they live.
        max_len: Largest number of positions of one request; 0 = the base's own limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_len: int = 0,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.base_gemm_calls = 0
        """Calls of base linears in layers since the start; the head is not counted."""
        reader = TensorReader(config, weights, dtype, self.device)
        self.layers = [DecoderLayer(reader, layer) for layer in range(config.num_layers)]
        self.final_norm = reader.read_norm(FINAL_NORM)
        self.embedding = reader.read_matrix(EMBEDDING)
        self.head = PackedLinear(self.embedding if config.is_tied else reader.read_matrix(HEAD))
        weights.release_all()
        angles = build_cos_sin(config.rope, config.head_dim, max_len or config.max_position_embeddings, dtype)
        self._cos_sin = angles.to(self.device)
        self._scale = config.head_dim**-0.5
        self.fused = (
            FusedLayers(self.layers, config, self._scale, self._cos_sin) if can_fuse(self.layers, dtype) else None
        )
        """The layers as one op; None: they are composed of single ones, as `_compute_layer` says."""

    def shortened(self, num_layers: int) -> Decoder:
        """A decoder of the first `num_layers` layers, at least one, with the same weights in the same memory."""
        short = copy.copy(self)
        short.layers = self.layers[:num_layers]
        if self.fused is not None:
            short.fused = FusedLayers(short.layers, self.config, self._scale, self._cos_sin)
        return short

    @property
    def linears(self) -> list[PackedLinear]:
        """Every base linear, the head last."""
        return [linear for layer in self.layers for linear in layer.linears.values()] + [self.head]

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        """Compute all rows and store their keys and values.

        Returns:
            The normalised hidden states, [T, E].
        """
        residual = functional.embedding(inputs.token_ids, self.embedding)
        if inputs.adapters is not None:
            adapt_embedding(residual, inputs.token_ids, inputs.adapters)
        x = rms_norm(residual, _gain(self.layers[0].input_norm, inputs), self.config.rms_norm_eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        if self.fused is not None:
            norms = [
                norm for pair in zip(self.layers, next_norms, strict=True) for norm in (pair[0].post_norm, pair[1])
            ]
            head_norms = [norm for layer in self.layers for norm in layer.head_norms]
            gains, head_gains = ([_gain(norm, inputs) for norm in found] for found in (norms, head_norms))
            self.base_gemm_calls += LINEARS_PER_LAYER * len(self.layers)
            return self.fused.run(x, residual, gains, head_gains, inputs, kv)
        for index, next_norm in enumerate(next_norms):
            x = self._compute_layer(index, x, residual, _gain(next_norm, inputs), inputs, kv)
        return x

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The scores of every token in the model's dtype: [Q, E] to [Q, V].

        Args:
            hidden: rows of what `forward` returned, [Q, E].
            adapters: which of these Q rows uses which adapter; None: none does.
        """
        scores = self.head(hidden)
        if adapters is not None:
            adapt_scores(scores, hidden, adapters)
        return scores

    def _compute_layer(
        self, index: int, x: Tensor, residual: Tensor, next_gain: Tensor, inputs: StepInputs, kv: KVCache
    ) -> Tensor:
        """One layer by single ops; `FusedLayers` does the same for all of them in one."""
        eps = self.config.rms_norm_eps
        x = self._attend(index, x, inputs, kv)
        x = add_rms_norm(x, residual, _gain(self.layers[index].post_norm, inputs), eps)
        return add_rms_norm(self._feed_forward(index, x, inputs), residual, next_gain, eps)

    def _attend(self, index: int, x: Tensor, inputs: StepInputs, kv: KVCache) -> Tensor:
        config, layer = self.config, self.layers[index]
        k_cache, v_cache = kv.k[index], kv.v[index]
        qkv = self._project(index, "qkv", x, inputs)
        if layer.head_norms:
            q_gain, k_gain = (_gain(norm, inputs) for norm in layer.head_norms)
            head_rms_norm(qkv, q_gain, k_gain, config.rms_norm_eps, config.num_heads, config.num_kv_heads)
        q = rope_and_store(
            qkv,
            inputs.positions,
            self._cos_sin,
            k_cache,
            v_cache,
            inputs.cells,
            config.num_heads,
            config.num_kv_heads,
        )
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            inputs.block_tables,
            inputs.query_start,
            inputs.context_len,
            self._scale,
            layer.window,
        )
        return self._project(index, "o", attended, inputs)

    def _feed_forward(self, index: int, x: Tensor, inputs: StepInputs) -> Tensor:
        return self._project(index, "down", silu_and_mul(self._project(index, "gate_up", x, inputs)), inputs)

    def _project(self, index: int, group: str, x: Tensor, inputs: StepInputs) -> Tensor:
        """One base linear for all rows, plus each row's own adapter."""
        y = self.layers[index].linears[group](x)
        self.base_gemm_calls += 1
        if inputs.adapters is not None:
            lora_add(x, y, inputs.adapters.table, index, group, inputs.adapters.segments)
        return y


def _gain(norm: Norm, inputs: StepInputs) -> Tensor:
    return own_gain(norm.path, norm.gain, inputs)
