"""What an adapter is judged against (`BaseSpec`) and what a judged adapter becomes (`AdapterPlan`).

Plain data that goes through JSON unchanged: the base's folder keeps a `BaseSpec`, the engine reads tensors by the byte
ranges of an `AdapterPlan`. Knows no file system and no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_LORA_RANK = 256
"""No base may allow more: the engine's kernels go up to it."""
MAX_SAVED_BYTES = 2 * 1024**3
"""Unless a base says otherwise: a bfloat16 embedding and head of 128k tokens and 4k features."""

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
    `max_lora_rank` is the highest rank that is taken, `max_saved_bytes` limits what one adapter may bring as whole
    matrices and rows. `matrix_hashes` maps the paths of embedding and head to dtype (F32, F16, BF16) to the sha256, in
    hex, of the matrix cast to it; empty for a base that was described before there were any.
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
    max_saved_bytes: int = MAX_SAVED_BYTES
    matrix_hashes: dict[str, dict[str, str]] = {}


class TensorRef(msgspec.Struct, frozen=True):
    """Where a tensor lies: bytes [start, stop) of the safetensors file itself, header included in the count."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class LoraModule(msgspec.Struct, frozen=True):
    """One base module under LoRA: y += scaling * (x A^T) B^T with a [rank, in_features], b [out_features, rank].

    On an embedding `in_features` is the vocabulary, `out_features` the width. `is_transposed`: both matrices are stored
    the other way round, as a head finds them that takes its LoRA from the embedding it is tied to. `magnitude`
    [out_features] makes it DoRA; `bias` [out_features] is the LoRA layer's own (`lora_bias`), scaled like the product.
    """

    path: str
    rank: int
    scaling: float
    a: TensorRef
    b: TensorRef
    magnitude: TensorRef | None = None
    bias: TensorRef | None = None
    is_transposed: bool = False


class SavedTensor(msgspec.Struct, frozen=True):
    """A trained tensor that stands in place of the base's: a module's weight, or its bias."""

    path: str
    ref: TensorRef


class TokenRows(msgspec.Struct, frozen=True):
    """Trained rows [len(token_ids), width] that replace those of an embedding or head, in the tensor's order."""

    path: str
    token_ids: tuple[int, ...]
    ref: TensorRef


class AdapterPlan(msgspec.Struct, frozen=True):
    """An accepted adapter: its identity and everything that it changes, as it takes effect on this base.

    `rank` is the largest of the modules' ranks, `target_modules` their leaf names (`q_proj`), sorted, `config` the
    honoured fields with defaults filled, `modules` sorted by path in natural order of layers. Weight tying is resolved:
    what changes the head stands under `lm_head`, also where its tensor is the embedding's. `invocation_ids` are the
    tokens from whose last occurrence in the prompt on the adapter acts (aLoRA); empty: everywhere. `dropped` names the
    file's copies of base matrices, equal to the base's and needed by nobody.
    """

    digest: str
    base_fingerprint: str
    config: dict[str, Any]
    rank: int
    target_modules: tuple[str, ...]
    num_parameters: int
    modules: tuple[LoraModule, ...]
    weights: tuple[SavedTensor, ...] = ()
    biases: tuple[SavedTensor, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    invocation_ids: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()
