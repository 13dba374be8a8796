"""Fuzz targets of base models: what somebody pulls, and what an engine reads of it when it starts."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

from fuzz_target import JSON_WORDS, Target, try_each
from loraplex_engine.bases.fingerprint import digest_tokenizer
from loraplex_engine.bases.gguf_file import GgufFile
from loraplex_engine.errors import EngineError
from loraplex_engine.models.config import load_config
from loraplex_engine.server.template_library import read_sources
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.weights.index import read_index


def fuzz_gguf(data: bytes) -> None:
    """A GGUF file that somebody pulls as a base."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        path.write_bytes(data)
        file = GgufFile(path)
        file.read_config()


def fuzz_base_config(data: bytes) -> None:
    """config.json and generation_config.json of a base, parted by NUL."""
    config, _, generation = data.partition(b"\0")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(config)
        if generation:
            Path(folder, "generation_config.json").write_bytes(generation)
        load_config(Path(folder))


def fuzz_base_tokenizer(data: bytes) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json of a base, parted by NUL."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(names, data.split(b"\0"), strict=False):
            Path(folder, name).write_bytes(content)
        try_each((lambda: digest_tokenizer(Path(folder), 64), lambda: read_sources(Path(folder))), (EngineError,))
        tokenizer = Tokenizer(Path(folder))
    tokenizer.encode_prompt("a b")
    tokenizer.min_tokens("a b")
    tokenizer.find_starts("a b")


def fuzz_base_weights(data: bytes) -> None:
    """The first byte chooses: a safetensors file of a base, or the index of its shards."""
    with tempfile.TemporaryDirectory() as folder:
        if data[:1] == b"i":
            Path(folder, "model.safetensors.index.json").write_bytes(data[1:])
            Path(folder, "a.safetensors").write_bytes(_SHARD)
        else:
            Path(folder, "model.safetensors").write_bytes(data[1:])
        for entry in read_index(Path(folder)).values():
            assert 8 <= entry.start <= entry.stop <= entry.file.stat().st_size


def _write_gguf() -> bytes:
    """A small one, written by the library."""
    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_embedding_length(8)
        writer.add_head_count(2)
        writer.add_block_count(1)
        writer.add_feed_forward_length(16)
        writer.add_context_length(32)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


_HEADER = b'{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
_SHARD = struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(8)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_ADDED = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_BPE = {
    "added_tokens": [{"id": 5, "content": "<s>", **_ADDED}],
    "pre_tokenizer": _BYTE_LEVEL,
    "decoder": _BYTE_LEVEL,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u010a": 4}, "merges": [["a", "b"]]},
}
_UNIGRAM = {
    "added_tokens": [],
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["\u2581b", -2.0]]},
}
_NAMES = (
    {"bos_token": "<s>", "eos_token": {"content": "a"}, "chat_template": [{"name": "default", "template": "x"}]},
    {"unk_token": "b"},
)
BASE_TARGETS = (
    Target(
        "gguf",
        fuzz_gguf,
        (_write_gguf(),),
        (EngineError,),
        words=(b"llama.", b"general.architecture", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x09\0\0\0"),
    ),
    Target(
        "base_config",
        fuzz_base_config,
        (json.dumps(_CONFIG).encode(), json.dumps(_CONFIG).encode() + b'\0{"eos_token_id": [1, 2]}'),
        (EngineError,),
        words=(*JSON_WORDS, b"sliding_window", b"head_dim", b"rope_scaling"),
    ),
    Target(
        "base_tokenizer",
        fuzz_base_tokenizer,
        tuple(b"\0".join(json.dumps(part).encode() for part in (model, *_NAMES)) for model in (_BPE, _UNIGRAM)),
        (EngineError,),
        words=(*JSON_WORDS, b'"ByteLevel"', b'"Metaspace"', b'"decoders"', b'"vocab"', b'"special": true'),
    ),
    Target(
        "base_weights",
        fuzz_base_weights,
        (b"f" + _SHARD, b'i{"weight_map": {"a": "a.safetensors"}}'),
        (EngineError,),
        words=(*JSON_WORDS, b"BF16", b"data_offsets"),
    ),
)
