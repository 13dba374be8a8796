"""Small adapters and bases, built byte by byte, so that each test can break one thing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex_registry.peft.spec import BaseSpec, ModuleSpec

HIDDEN, KV, INNER, VOCAB, LAYERS = 16, 8, 24, 40, 2
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}

Tensors = dict[str, np.ndarray]


def build_base(**changes: Any) -> BaseSpec:
    modules = {
        f"model.layers.{layer}.{name}": ModuleSpec(*shape) for layer in range(LAYERS) for name, shape in SHAPES.items()
    }
    for layer in range(LAYERS):
        modules[f"model.layers.{layer}.input_layernorm"] = ModuleSpec(HIDDEN, 1, "norm")
        modules[f"model.layers.{layer}.post_attention_layernorm"] = ModuleSpec(HIDDEN, 1, "norm")
    modules["model.norm"] = ModuleSpec(HIDDEN, 1, "norm")
    modules["model.embed_tokens"] = ModuleSpec(VOCAB, HIDDEN, "embedding")
    modules["lm_head"] = ModuleSpec(VOCAB, HIDDEN, "head")
    facts: dict[str, Any] = {
        "name": "tiny",
        "accepted_names": ("Lab/Tiny-Instruct",),
        "fingerprint": "sha256:" + "a" * 64,
        "weights_digest": "sha256:" + "b" * 64,
        "vocab_size": VOCAB,
        "modules": modules,
    }
    return BaseSpec(**{**facts, **changes})


def build_tensors(
    rank: int = 4, modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"), dtype: str = "<f4"
) -> Tensors:
    rng = np.random.default_rng(7)
    tensors = {}
    for layer in range(LAYERS):
        for name in modules:
            out_features, in_features = SHAPES[name]
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = rng.standard_normal((rank, in_features)).astype(dtype)
            tensors[f"{path}.lora_B.weight"] = rng.standard_normal((out_features, rank)).astype(dtype)
    return tensors


def build_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "Lab/Tiny-Instruct",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def encode_safetensors(tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with the tensors in the order given; `dtypes` renames dtypes (BF16 stored as uint16)."""
    names = {"float32": "F32", "float16": "F16", "float64": "F64", "int8": "I8", "uint16": "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        dtype = (dtypes or {}).get(name, names[array.dtype.name])
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return frame(json.dumps(header).encode(), data)


def frame(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


WriteAdapter = Callable[..., dict[str, Path]]


@pytest.fixture
def base() -> BaseSpec:
    return build_base()


@pytest.fixture
def tensors() -> Tensors:
    return build_tensors()


@pytest.fixture
def write_adapter(tmp_path: Path) -> WriteAdapter:
    """Writes a folder: config fields by keyword, `weights` as arrays or bytes, `config` as bytes, `extra` files."""

    def write(
        *,
        weights: Mapping[str, np.ndarray] | bytes | None = None,
        config: bytes | None = None,
        extra: Mapping[str, bytes] | None = None,
        **fields: Any,
    ) -> dict[str, Path]:
        weights = build_tensors() if weights is None else weights
        contents = {
            "adapter_config.json": json.dumps(build_config(**fields)).encode() if config is None else config,
            "adapter_model.safetensors": weights if isinstance(weights, bytes) else encode_safetensors(weights),
            **(extra or {}),
        }
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return {name: tmp_path / name for name in contents}

    return write


@pytest.fixture
def encode() -> Callable[..., bytes]:
    return encode_safetensors


@pytest.fixture
def frame_header() -> Callable[..., bytes]:
    return frame


@pytest.fixture
def make_base() -> Callable[..., BaseSpec]:
    return build_base


@pytest.fixture
def make_tensors() -> Callable[..., Tensors]:
    return build_tensors


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    return build_config
