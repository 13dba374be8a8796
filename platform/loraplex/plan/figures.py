"""What a plan answers: integers, with their unit in the name. Bytes are bytes; people's units are made in `explain`."""

from __future__ import annotations

import msgspec


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The base. `kv_bytes_per_token` is by the cache's dtype."""

    name: str
    architecture: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: dict[str, int]
    max_position_embeddings: int


class AdapterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of one form. `layer_parameters` is None where the values were counted in a file."""

    count: int
    rank: int
    modules: list[str]
    layer_parameters: int | None
    num_parameters: int
    adapter_bytes: int
    total_bytes: int


class CardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One card's memory, by use. With `tensor_parallel_size` above 1 weights, slots and cache are this card's share.

    `free_bytes` is what is left for the KV cache, below 0 where the rest is too much already. `full_contexts` are
    requests of `max_model_len` that the cache holds at once; `tokens_per_request` what each of `max_num_seqs` has on
    average.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    tensor_parallel_size: int
    weight_bytes: int
    step_bytes: int
    overhead_bytes: int
    max_loras: int
    slot_bytes: int
    free_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    full_contexts: int
    tokens_per_request: int
    fits: bool
    verdict: str


class SlotFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache keeps if so many adapters are loaded at once, the largest ones."""

    max_loras: int
    slot_bytes: int
    kv_tokens: int
    full_contexts: int


class CopyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A full model for each adapter against one base with all adapters.

    `ratio_tenths` is the copies' bytes over the adapters' bytes, in tenths. `gpus_for_weights` counts weights over the
    cards' whole memory; `gpus_for_copies` whole processes that can serve one context each; None: no number of cards is
    enough with this tensor parallelism. `gpus_for_adapters` is one replica of the base with its slots.
    """

    num_copies: int
    copies_bytes: int
    adapters_bytes: int
    base_and_adapters_bytes: int
    ratio_tenths: int
    gpus_for_weights: int
    copy_bytes: int
    copies_per_gpu: int
    gpus_for_copies: int | None
    gpus_for_adapters: int | None


class QuotedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The same sum with its units mixed, as it is found quoted, beside the exact one."""

    mixed_gib: str
    exact_gib: str
    mixed_ratio: str
    exact_ratio: str
    reason: str


class Row(msgspec.Struct, frozen=True):
    """One figure for people: what it is, its value with its unit, and how it comes about."""

    name: str
    value: str
    formula: str = ""


class Section(msgspec.Struct, frozen=True):
    """Figures under one heading."""

    title: str
    rows: list[Row]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; `explanation` says the same for people."""

    model: ModelFigures
    adapters: list[AdapterFigures]
    card: CardFigures
    slots: list[SlotFigures]
    copies: CopyFigures | None
    quoted: QuotedFigures | None
    explanation: list[Section] = []
