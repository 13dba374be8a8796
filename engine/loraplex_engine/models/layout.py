"""Which modules and tensors a decoder has, by the names that `transformers` gives them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.config import ModelConfig
from loraplex_registry.peft.spec import ModuleSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"

# tensors that old exporters wrote and that hold nothing of their own
_REDUNDANT_ENDINGS = (".rotary_emb.inv_freq",)


def layer_path(layer: int, leaf: str) -> str:
    """The path of a module in a layer: `model.layers.3.self_attn.q_proj`."""
    return f"model.layers.{layer}.{leaf}"


def build_modules(config: ModelConfig) -> dict[str, ModuleSpec]:
    """Every module that holds weights, in the order of the forward pass."""
    modules = {EMBEDDING: ModuleSpec(config.vocab_size, config.hidden_size, "embedding")}
    for layer in range(config.num_layers):
        modules |= {layer_path(layer, leaf): spec for leaf, spec in _layer_modules(config)}
    modules[FINAL_NORM] = ModuleSpec(config.hidden_size, 1, "norm")
    modules[HEAD] = ModuleSpec(config.vocab_size, config.hidden_size, "head", tied=config.is_tied)
    return modules


def _layer_modules(config: ModelConfig) -> Iterator[tuple[str, ModuleSpec]]:
    hidden, inner, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    qkv_bias, mlp_bias = config.has_qkv_bias, config.has_mlp_bias
    yield "input_layernorm", ModuleSpec(hidden, 1, "norm")
    yield "self_attn.q_proj", ModuleSpec(q_size, hidden, has_bias=qkv_bias)
    yield "self_attn.k_proj", ModuleSpec(kv_size, hidden, has_bias=qkv_bias)
    yield "self_attn.v_proj", ModuleSpec(kv_size, hidden, has_bias=qkv_bias)
    if config.has_qk_norm:
        yield "self_attn.q_norm", ModuleSpec(config.head_dim, 1, "norm")
        yield "self_attn.k_norm", ModuleSpec(config.head_dim, 1, "norm")
    yield "self_attn.o_proj", ModuleSpec(hidden, q_size, has_bias=config.has_o_bias)
    yield "post_attention_layernorm", ModuleSpec(hidden, 1, "norm")
    yield "mlp.gate_proj", ModuleSpec(inner, hidden, has_bias=mlp_bias)
    yield "mlp.up_proj", ModuleSpec(inner, hidden, has_bias=mlp_bias)
    yield "mlp.down_proj", ModuleSpec(hidden, inner, has_bias=mlp_bias)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that the forward pass reads; a tied head has none."""
    tensors: dict[str, tuple[int, ...]] = {}
    for path, spec in build_modules(config).items():
        if spec.tied:
            continue
        is_vector = spec.kind == "norm"
        tensors[f"{path}.weight"] = (spec.out_features,) if is_vector else (spec.out_features, spec.in_features)
        if spec.has_bias:
            tensors[f"{path}.bias"] = (spec.out_features,)
    return tensors


def check_tensors(config: ModelConfig, found: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Refuse a base that lacks a tensor, has one of another shape, or has one that the forward pass would not use.

    Raises:
        BaseUnsupportedError: the message names the first such tensor.
    """
    expected, shapes = expected_tensors(config), dict(found)
    for name, shape in expected.items():
        if name not in shapes:
            raise BaseUnsupportedError(f"The weights lack the tensor {name}.")
        if shapes[name] != shape:
            raise BaseUnsupportedError(f"The tensor {name} is {list(shapes[name])}, but the config says {list(shape)}.")
    for name in sorted(shapes.keys() - expected.keys()):
        if not _is_redundant(config, name):
            raise BaseUnsupportedError(f"The weights hold a tensor that this architecture does not use: {name}.")


def _is_redundant(config: ModelConfig, name: str) -> bool:
    return name.endswith(_REDUNDANT_ENDINGS) or (config.is_tied and name == f"{HEAD}.weight")
