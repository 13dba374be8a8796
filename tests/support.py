"""Small real things for tests: base models, tokenizers and adapters, written as the folders that tools save.

Everything is random but seeded, made from numpy and `tokenizers` alone, so that building one costs milliseconds and
needs neither torch nor the network. It knows file formats; it knows nothing of the parts under test.
"""

from __future__ import annotations

import _socket
import fcntl
import json
import random
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The refund is on its way and the parcel left the warehouse this morning.",
    "A low rank adapter changes a model by a product of two thin matrices.",
    "Forty teams share one copy of the base; each of them sees its own voice.",
    "def total(items): return sum(item.price for item in items)",
    "Grüße aus Köln, café au lait, naïve façade, 東京, emoji 🙂 and numbers 0123456789.",
)
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUMPY_TO_SAFETENSORS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_PORT_LOCKS = Path(tempfile.gettempdir()) / "loraplex-test-ports"
_held_locks: list[IO[str]] = []

Tensors = dict[str, np.ndarray[Any, Any]]


def free_port() -> int:
    """A TCP port of the loopback for this process alone; prefer listening on port 0 where the code can.

    It lies below those that the kernel gives to whoever asks for any, and a lock keeps it from other tests.
    """
    _PORT_LOCKS.mkdir(mode=0o777, exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        lock = (_PORT_LOCKS / str(port)).open("w")
        # not `socket.socket`, which is switched off for most tests
        probe = _socket.socket()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        finally:
            probe.close()
        _held_locks.append(lock)
        return port


def write_json(path: Path, content: Any) -> Path:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], dtype: str = "float32") -> Path:
    """Write `tensors` in one dtype; `bfloat16` rounds to nearest even, as torch does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name in sorted(tensors):
        data = _encode(tensors[name], dtype)
        shape = list(tensors[name].shape)
        header[name] = {
            "dtype": _NUMPY_TO_SAFETENSORS[dtype],
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))
    return path


def _encode(tensor: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype != "bfloat16":
        return np.ascontiguousarray(tensor, dtype=dtype).tobytes()
    bits = np.ascontiguousarray(tensor, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of all tensors of a safetensors file, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with about 320 entries, trained on `CORPUS`, ChatML tokens at ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (ENDOFTEXT, IM_START, IM_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder: Path, *, template_in_config: bool = False) -> None:
    """Write the tokenizer's files; the chat template in its own file, or inside the config as older tools do."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if template_in_config:
        config["chat_template"] = CHAT_TEMPLATE
    else:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)


def tiny_llama_config(**changes: Any) -> dict[str, Any]:
    """Grouped queries 6 to 2, a head_dim that is not hidden/heads, untied, widths off the multiples of 16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 331,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **changes,
    }


def tiny_tied_config(**changes: Any) -> dict[str, Any]:
    """One KV head per query head and a head tied to the embedding; settings named as transformers 5 writes them."""
    config = tiny_llama_config(
        hidden_size=48,
        intermediate_size=120,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        dtype="float32",
    )
    del config["rope_theta"], config["torch_dtype"]
    return {**config, **changes}


def tiny_qwen2_config(**changes: Any) -> dict[str, Any]:
    """Qwen2 with biases on q, k and v, all eight query heads on one KV head, untied."""
    config = tiny_llama_config(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=347,
        hidden_size=64,
        intermediate_size=88,
        num_attention_heads=8,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
        use_sliding_window=False,
    )
    for llama_only in ("head_dim", "attention_bias", "mlp_bias"):
        del config[llama_only]
    return {**config, **changes}


def write_base(folder: Path, config: Mapping[str, Any], *, seed: int = 7, dtype: str = "float32") -> Path:
    """Write a whole random base model: weights, config, tokenizer, generation config.

    Args:
        folder: Created; its last part is the base's name.
        config: A Hugging Face `config.json` of a Llama-like decoder.
        seed: Of the weights. Linears are scaled to keep activations near one, so logits differ visibly.
        dtype: On disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0})
    write_tokenizer(folder, template_in_config=config["model_type"] == "qwen2")
    write_safetensors(folder / "model.safetensors", _random_weights(config, seed), dtype)
    return folder


def linear_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Module path to (out_features, in_features) of every linear an adapter may target."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * head_dim, config["num_key_value_heads"] * head_dim
    leaves = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{leaf}": shape for layer in layers for leaf, shape in leaves.items()}


def _random_weights(config: Mapping[str, Any], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors: Tensors = {"model.embed_tokens.weight": rng.normal(size=(vocab, hidden)) / hidden**0.5}
    for path, (out_features, in_features) in linear_shapes(config).items():
        tensors[f"{path}.weight"] = rng.normal(size=(out_features, in_features)) / in_features**0.5
        if config["model_type"] == "qwen2" and path.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{path}.bias"] = rng.normal(size=out_features) * 0.5
    norms = [f"model.layers.{layer}.{name}" for layer in range(config["num_hidden_layers"]) for name in _LAYER_NORMS]
    for path in [*norms, "model.norm"]:
        tensors[f"{path}.weight"] = 1.0 + 0.1 * rng.normal(size=hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = rng.normal(size=(vocab, hidden)) / hidden**0.5
    return tensors


_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def adapter_config(base_name: str, **changes: Any) -> dict[str, Any]:
    """The `adapter_config.json` that PEFT writes for a plain LoRA, with `changes`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        **changes,
    }


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 8,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    std: float = 0.2,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write a PEFT folder with random A and B for a base written by `write_base`.

    Args:
        folder: Created.
        base: Folder of the base; its `config.json` gives the shapes, its last part the name in the config.
        rank: `r`; `rank_pattern` in `changes` is honoured for plain names and dotted endings.
        targets: Leaf names of the target modules.
        seed: Of the tensors.
        std: Of the entries of A and B; 0.2 moves the logits of a tiny base far beyond any tolerance.
        dtype: On disk.
        changes: Further fields of the config.
    """
    targets = sorted(targets)
    folder.mkdir(parents=True, exist_ok=True)
    base_config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config = adapter_config(base.name, **{"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **changes})
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for path, (out_features, in_features) in linear_shapes(base_config).items():
        if path.rsplit(".", 1)[1] not in targets:
            continue
        r = _rank_of(path, rank, config["rank_pattern"])
        tensors[f"base_model.model.{path}.lora_A.weight"] = rng.normal(size=(r, in_features)) * std
        tensors[f"base_model.model.{path}.lora_B.weight"] = rng.normal(size=(out_features, r)) * std
    write_json(folder / "adapter_config.json", config)
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype)
    return folder


def _rank_of(path: str, rank: int, rank_pattern: Mapping[str, int]) -> int:
    for ending, value in rank_pattern.items():
        if f".{path}".endswith(f".{ending}"):
            return value
    return rank
