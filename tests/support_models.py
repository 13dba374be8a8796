"""Bases that `transformers` itself writes, and a way to drive a `Decoder` without scheduler or runner.

For tests whose truth is `transformers`. Imports torch; `support.py` builds bases without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.kv.cache import KVCache, build_kv_cache
from loraplex_engine.models.config import load_config
from loraplex_engine.models.decoder import Decoder, lora_shapes
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.segment import build_segments
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.weights.source import WeightSource
from support import write_tokenizer

_SIZES = {
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # a head_dim that is not hidden / heads
    "llama": ("llama", {"head_dim": 20}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama-rope-yarn": ("llama", {"rope_parameters": _YARN, "head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 5}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True, "sliding_window": 9, "head_dim": 16}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 80}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-rope-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True, "rope_parameters": _LINEAR}),
    "qwen3-sliding": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}
"""Name to model type and config: grouped queries 1, 3 and 8, widths off the multiples of 16, a vocabulary of 331."""


def write_hf_base(folder: Path, model_type: str, *, seed: int = 3, **changes: Any) -> Path:
    """Let `transformers` write a random model whose logits differ visibly, and a real small tokenizer beside it."""
    config = AutoConfig.for_model(model_type, **{**_SIZES, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_like(name, parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _random_like(name: str, parameter: Tensor) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.1 * torch.randn_like(parameter)
    if name.endswith(".bias"):
        return 0.5 * torch.randn_like(parameter)
    return torch.randn_like(parameter) / parameter.shape[-1] ** 0.5


def shard(base: Path, folder: Path) -> Path:
    """Write the same base in two shards with an index."""
    folder.mkdir()
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / file).write_bytes((base / file).read_bytes())
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same base in `transformers`, with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits of one prompt, [n, V]."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


@dataclass
class Running:
    """One request under test: its tokens, how many are computed, where they are kept, and its adapter's slot."""

    token_ids: list[int]
    block_ids: list[int]
    slot: int = NO_SLOT
    num_computed: int = 0


@dataclass
class PagedModel:
    """A `Decoder` with a cache full of NaN and blocks that are handed out in a scattered order."""

    decoder: Decoder
    cache: KVCache
    table: LoraTable
    replacements: Replacements
    block_size: int
    free: list[int] = field(default_factory=list)

    def start(self, token_ids: Sequence[int], slot: int = NO_SLOT) -> Running:
        """Give a request blocks for all its tokens."""
        num_blocks = -(-len(token_ids) // self.block_size)
        return Running(list(token_ids), [self.free.pop() for _ in range(num_blocks)], slot)

    @torch.inference_mode()
    def step(self, *work: tuple[Running, int]) -> list[Tensor]:
        """Compute the next n tokens of each request in one forward pass; logits [n, V] of each."""
        inputs = self._build_inputs(work)
        logits = self.decoder.logits(self.decoder.forward(inputs, self.cache), inputs.adapters)
        for sequence, count in work:
            sequence.num_computed += count
        return list(torch.split(logits, [count for _, count in work]))

    def _build_inputs(self, work: Sequence[tuple[Running, int]]) -> StepInputs:
        spans = [(s, range(s.num_computed, s.num_computed + count)) for s, count in work]
        widest = max(len(s.block_ids) for s, _ in work)
        starts = torch.tensor([0, *(count for _, count in work)]).cumsum(0)
        return StepInputs(
            token_ids=torch.tensor([s.token_ids[p] for s, span in spans for p in span]),
            positions=torch.tensor([p for _, span in spans for p in span]),
            cells=torch.tensor([self._cell(s, p) for s, span in spans for p in span]),
            block_tables=torch.tensor(
                [s.block_ids + [0] * (widest - len(s.block_ids)) for s, _ in work], dtype=torch.int32
            ),
            query_start=starts.to(torch.int32),
            context_len=torch.tensor([span.stop for _, span in spans], dtype=torch.int32),
            adapters=self._find_adapters([s.slot for s, count in work for _ in range(count)]),
        )

    def _find_adapters(self, slot_of_row: list[int]) -> AdapterRows | None:
        segments = build_segments(slot_of_row)
        slots = tuple(sorted(set(slot_of_row) - {NO_SLOT}))
        return None if segments is None else AdapterRows(segments, slots, self.table, self.replacements)

    def _cell(self, sequence: Running, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size


def load_paged(
    folder: Path, dtype: torch.dtype = torch.float32, *, block_size: int = 4, num_blocks: int = 97, num_slots: int = 4
) -> PagedModel:
    """Load the base of a Hugging Face folder for `PagedModel`."""
    config = load_config(folder)
    decoder = Decoder(config, WeightSource(folder), dtype)
    cache = build_kv_cache(config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(torch.nan)
    table = LoraTable(num_slots, config.num_layers, lora_shapes(config), max_rank=16, dtype=dtype)
    scattered = [(7 * index) % num_blocks for index in range(num_blocks)]
    return PagedModel(decoder, cache, table, Replacements(num_slots), block_size, scattered)
