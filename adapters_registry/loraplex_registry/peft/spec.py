"""What an adapter is judged against (`BaseSpec`) and what a judged adapter becomes (`AdapterPlan`).

Plain data that goes through JSON unchanged: the base's folder keeps a `BaseSpec`, the engine reads tensors by the byte
ranges of an `AdapterPlan`. Knows no file system and no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ModuleKind = Literal["linear", "norm", "embedding", "head"]


class ModuleSpec(msgspec.Struct, frozen=True):
    """One module of a base that holds weights.

    A linear or head has weight [out_features, in_features], an embedding [vocabulary, width] as
    `out_features, in_features`, a norm [out_features] with `in_features` 1. `tied` marks a head that shares the
    embedding's matrix.
    """

    out_features: int
    in_features: int
    kind: ModuleKind = "linear"
    has_bias: bool = False
    tied: bool = False


class BaseSpec(msgspec.Struct, frozen=True):
    """The facts about a base model that decide whether an adapter fits.

    `modules` maps the module's path in the transformers causal model (`model.layers.0.self_attn.q_proj`) to its spec.
    """

    name: str
    accepted_names: tuple[str, ...]
    fingerprint: str
    weights_digest: str
    vocab_size: int
    modules: dict[str, ModuleSpec]
    max_lora_rank: int = 64
    default_context: int = 2048
    architecture: str = "LlamaForCausalLM"


class TensorRef(msgspec.Struct, frozen=True):
    """Where a tensor lies: bytes [start, stop) of the safetensors file itself, header included in the count."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class LoraModule(msgspec.Struct, frozen=True):
    """One base module under LoRA: y += scaling * (x A^T) B^T with a [rank, in_features], b [out_features, rank]."""

    path: str
    rank: int
    scaling: float
    a: TensorRef
    b: TensorRef


class AdapterPlan(msgspec.Struct, frozen=True):
    """An accepted adapter: its identity and every module with the rank and scaling in effect.

    `rank` is the largest of the modules' ranks, `target_modules` their leaf names (`q_proj`), sorted, `config` the
    honoured fields with defaults filled, `modules` sorted by path in natural order of layers.
    """

    digest: str
    base_fingerprint: str
    config: dict[str, Any]
    rank: int
    target_modules: tuple[str, ...]
    num_parameters: int
    modules: tuple[LoraModule, ...]
