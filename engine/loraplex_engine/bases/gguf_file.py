"""Reads a GGUF file of the Llama architecture: its config, and its tensors as float32 rows in `transformers` order.

One piece of one tensor is in memory at a time. GGUF stores the rows of q and k permuted (rotary pairs side by side);
rows are put back in the order that `transformers` uses before they are dequantised. Other architectures, rope scalings
and tensors are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import expected_tensors

_PIECE_FLOATS = 1 << 20
_MAX_MESSAGE = 300
_MAX_SHOWN = 40
_SERVED_ARCHITECTURE = "llama"
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufFile:
    """One opened GGUF file.

    Args:
        path: The file; mapped, not read.

    Raises:
        BaseUnsupportedError: it is not a whole GGUF file, or its architecture is not served.
    """

    def __init__(self, path: Path) -> None:
        from loraplex_engine.bases.gguf_reader import BoundedReader

        self.name = path.name
        try:
            reader = BoundedReader(path)
        # the library reads what the file says of itself, and fails as that leads it
        except Exception as error:
            raise BaseUnsupportedError(f"{path.name} is not a whole GGUF file: {error!r}"[:_MAX_MESSAGE]) from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.get("general.architecture")
        if architecture != _SERVED_ARCHITECTURE:
            raise BaseUnsupportedError(
                f"{path.name} holds the GGUF architecture {architecture!r}; from GGUF only {_SERVED_ARCHITECTURE!r} is "
                "served. Pull the model's Hugging Face folder instead."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of one metadata key.

        Raises:
            BaseUnsupportedError: it is not what the file says that it is.
        """
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, LookupError, TypeError) as error:
            raise BaseUnsupportedError(f"{self.name} has a damaged value of {key}.") from error

    def read_config(self) -> dict[str, Any]:
        """The `config.json` of the model in the file.

        Raises:
            BaseUnsupportedError: it has experts or a rope scaling that GGUF names and we do not read, or a key or a
                tensor that the config is made of is not there or not of its kind.
        """
        self._check_served()
        num_heads = self._count("llama.attention.head_count")
        hidden_size = self._count("llama.embedding_length")
        rope = {"rope_type": "default", "rope_theta": self._real("llama.rope.freq_base", 10000.0)}
        if self.get("llama.rope.scaling.type", "none") == "linear":
            rope |= {"rope_type": "linear", "factor": self._real("llama.rope.scaling.factor")}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self._matrix_shape("token_embd.weight")[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._count("llama.feed_forward_length"),
            "num_hidden_layers": self._count("llama.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._count("llama.attention.head_count_kv", num_heads),
            "head_dim": self._count("llama.attention.key_length", hidden_size // num_heads),
            "hidden_act": "silu",
            "rms_norm_eps": self._real("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "max_position_embeddings": self._count("llama.context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._token("eos"),
            "pad_token_id": self._token("padding"),
            "dtype": "float32",
        }

    def read_tensor(self, name: str, config: ModelConfig) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        """The tensor that `transformers` calls `name`, as consecutive pieces of float32 rows."""
        tensor = self._tensor(gguf_name(name))
        data = tensor.data
        order = _row_order(name, config, len(data))
        rows = max(1, _PIECE_FLOATS // int(tensor.shape[0])) if data.ndim > 1 else len(data)
        for start in range(0, len(data), rows):
            piece = data[start : start + rows] if order is None else data[order[start : start + rows]]
            yield np.ascontiguousarray(self._dequantize(piece, tensor.tensor_type), dtype=np.float32)

    def check_names(self, config: ModelConfig) -> None:
        """Refuse a file with a tensor that the forward pass would not use."""
        known = {gguf_name(name) for name in expected_tensors(config)}
        for name in sorted(self._tensors.keys() - known):
            why = "scaled rope frequencies" if name == "rope_freqs.weight" else "a tensor that is not served"
            raise BaseUnsupportedError(f"{self.name} holds {why}: {name}. Pull its Hugging Face folder instead.")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor that `transformers` calls `name`, in its order: rows first."""
        return tuple(int(size) for size in reversed(self._tensor(gguf_name(name)).shape))

    def _check_served(self) -> None:
        if self.get("llama.expert_count", 0):
            raise BaseUnsupportedError(f"{self.name} holds a mixture of experts, which is not served.")
        scaling = self.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise BaseUnsupportedError(f"{self.name} has rope scaling {scaling!r}, which is not read from GGUF.")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._given(key, default)
        if type(value) is not int or value < 1:
            raise BaseUnsupportedError(f"{self.name} has {key} {str(value)[:_MAX_SHOWN]!r}, which is no count.")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BaseUnsupportedError(f"{self.name} has {key} {str(value)[:_MAX_SHOWN]!r}, which is no number.")
        return _short(value)

    def _token(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise BaseUnsupportedError(f"{self.name} has {key} {str(value)[:_MAX_SHOWN]!r}, which is no token.")
        return value

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise BaseUnsupportedError(f"{self.name} lacks the key {key}.")
        return value

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        shape = [int(size) for size in reversed(self._tensor(name).shape)]
        if len(shape) != 2:
            raise BaseUnsupportedError(f"{self.name} has the tensor {name} of shape {shape}, not a matrix.")
        return shape[0], shape[1]

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise BaseUnsupportedError(f"{self.name} lacks the tensor {name}.")
        return self._tensors[name]

    def _dequantize(self, data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
        from gguf.quants import dequantize

        try:
            return np.asarray(dequantize(data, kind))
        except NotImplementedError:
            raise BaseUnsupportedError(f"{self.name} uses the quantisation {kind.name}, which is not read.") from None


def gguf_name(name: str) -> str:
    """GGUF's name for a tensor that `transformers` calls `name`."""
    path, kind = name.rsplit(".", 1)
    if path in _TOP_NAMES:
        return f"{_TOP_NAMES[path]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    assert match, f"no GGUF name for {name}"
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"


def _row_order(name: str, config: ModelConfig, num_rows: int) -> np.ndarray[Any, Any] | None:
    """Row i of `transformers`' tensor is row order[i] of GGUF's; None where the two agree."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _short(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
