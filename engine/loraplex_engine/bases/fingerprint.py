"""What a base is, as digests that do not depend on where its bytes came from.

`fingerprint` covers what decides whether an adapter fits and means the same: architecture, tensor names and shapes, and
the tokenizer. `weights_digest` covers the bytes of the weights, so a dequantised and a full-precision copy of one model
share the first and differ in the second.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from loraplex_engine.bases.matrix import hash_matrices
from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.config import ModelConfig, load_config
from loraplex_engine.models.layout import build_modules, check_tensors, expected_tensors
from loraplex_engine.weights.index import TensorEntry, hash_tensors, read_index
from loraplex_registry.peft.spec import BaseSpec

# how an answer ends is not part of what the model is
_OUTSIDE = ("eos_token_ids",)


def build_spec(
    folder: Path, name: str, accepted_names: Iterable[str], hashes: Mapping[str, str] | None = None
) -> tuple[BaseSpec, dict[str, str]]:
    """Judge the Hugging Face folder `folder` and describe it.

    Args:
        folder: Holds config, tokenizer and safetensors.
        name: Under which the base is served.
        accepted_names: What adapters may call it besides.
        hashes: sha256 of each tensor's bytes where they are known already; else the weights are read once.

    Returns:
        The spec, and the sha256 (hex) of each tensor that the forward pass reads.

    Raises:
        BaseUnsupportedError: something in the folder is not served, or does not fit together.
    """
    config = load_config(folder)
    index = read_index(folder)
    check_tensors(config, ((entry.name, entry.shape) for entry in index.values()))
    used = [index[tensor] for tensor in expected_tensors(config)]
    hashes = dict(hashes) if hashes is not None else hash_tensors(used)
    spec = BaseSpec(
        name=name,
        accepted_names=tuple(accepted_names),
        fingerprint=compute_fingerprint(config, digest_tokenizer(folder, config.vocab_size)),
        weights_digest=digest_weights(used, hashes),
        vocab_size=config.vocab_size,
        modules=build_modules(config),
        default_context=config.max_position_embeddings,
        architecture=config.architecture,
        matrix_hashes=hash_matrices(index, is_tied=config.is_tied),
    )
    return spec, dict(sorted(hashes.items()))


def complete_spec(folder: Path, spec: BaseSpec) -> BaseSpec:
    """The spec of a pulled base with what a spec of today says; an older one had no hashes of its matrices."""
    if spec.matrix_hashes:
        return spec
    hashes = hash_matrices(read_index(folder), is_tied=load_config(folder).is_tied)
    return msgspec.structs.replace(spec, matrix_hashes=hashes)


def compute_fingerprint(config: ModelConfig, tokenizer_digest: str) -> str:
    """`sha256:<hex>` over architecture fields, tensor names and shapes, and the tokenizer's digest."""
    facts = {key: value for key, value in asdict(config).items() if key not in _OUTSIDE}
    tensors = [[name, list(shape)] for name, shape in sorted(expected_tensors(config).items())]
    return _digest({"v": 1, "architecture": _rounded(facts), "tensors": tensors, "tokenizer": tokenizer_digest})


def digest_tokenizer(folder: Path, vocab_size: int) -> str:
    """`sha256:<hex>` over vocabulary, merges and added tokens of `tokenizer.json`, whatever their spelling there.

    Raises:
        BaseUnsupportedError: there is none, or it has ids that the embedding lacks.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise BaseUnsupportedError(f"There is no tokenizer.json in {folder}; save the fast tokenizer beside the model.")
    try:
        return _digest_tokenizer(path, vocab_size)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BaseUnsupportedError(f"{path} is not a tokenizer of the `tokenizers` library.") from None


def _digest_tokenizer(path: Path, vocab_size: int) -> str:
    content = json.loads(path.read_bytes())
    model, added = content["model"], content.get("added_tokens") or []
    entries = _vocabulary(model["vocab"], added)
    if entries and max(index for _, index in entries) >= vocab_size:
        raise BaseUnsupportedError(f"{path} has more tokens than the embedding, which has {vocab_size} rows.")
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model.get("merges") or []]
    return _digest({"vocabulary": entries, "merges": merges, "added": sorted(added, key=lambda token: token["id"])})


def _vocabulary(vocab: Any, added: list[dict[str, Any]]) -> list[list[Any]]:
    # unigram models list [token, score]; the position is the id
    pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], i) for i, item in enumerate(vocab))
    together = {**dict(pairs), **{token["content"]: token["id"] for token in added}}
    return sorted(([token, index] for token, index in together.items()), key=lambda entry: (entry[1], entry[0]))


def digest_weights(entries: Iterable[TensorEntry], hashes: Mapping[str, str]) -> str:
    """`sha256:<hex>` over name, dtype, shape and sha256 of each tensor, sorted by name."""
    items = [[entry.name, entry.dtype, list(entry.shape), hashes[entry.name]] for entry in entries]
    return _digest(sorted(items))


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _rounded(value: Any) -> Any:
    """Floats as float32, since that is what GGUF keeps of 1e-05."""
    if isinstance(value, float):
        return struct.unpack("f", struct.pack("f", value))[0]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
