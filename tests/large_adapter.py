"""Adapters of many megabytes without a base on disk: bytes made once, cut into files of which no two are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

HIDDEN, NUM_LAYERS = 2048, 32
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_CHUNK = 1 << 20
_serial = count(1)


def describe_base(name: str) -> dict[str, Any]:
    """The body that makes a base known on which these adapters fit."""
    paths = (f"model.layers.{layer}.self_attn.{module}" for layer in range(NUM_LAYERS) for module in MODULES)
    return {
        "name": name,
        "fingerprint": "sha256:" + "b" * 64,
        "modules": {path: [HIDDEN, HIDDEN] for path in paths},
        "vocab_size": 32000,
        "max_lora_rank": 128,
    }


class LargeAdapter:
    """Bytes of one adapter; `cut` gives them with another beginning of the tensors each time.

    A rank on a module is a quarter of a MiB over all layers: each of its two tensors is 4096 bytes a rank.
    """

    def __init__(self, base: str, rank: int, modules: Sequence[str]) -> None:
        self.config = msgspec.json.encode(
            {
                "peft_type": "LORA",
                "base_model_name_or_path": base,
                "r": rank,
                "lora_alpha": rank,
                "target_modules": list(modules),
                "task_type": "CAUSAL_LM",
                "bias": "none",
            }
        )
        header: dict[str, Any] = {}
        offset = 0
        for layer in range(NUM_LAYERS):
            for module in modules:
                path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                for half, shape in (("lora_A", [rank, HIDDEN]), ("lora_B", [HIDDEN, rank])):
                    end = offset + 2 * shape[0] * shape[1]
                    header[f"{path}.{half}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
                    offset = end
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        # bfloat16 between 2^-7 and 2^-6, either sign: finite whatever the other bits are
        bits = np.random.default_rng(0).integers(0, 1 << 16, offset // 2, dtype=np.uint16)
        self._tensors = memoryview(((bits & 0x807F) | 0x3C00).tobytes())

    @property
    def num_bytes(self) -> int:
        """Size of the weights' file."""
        return len(self._head) + len(self._tensors)

    def cut(self) -> Iterator[bytes | memoryview]:
        """Yield a file of weights like no other."""
        digits = [(next_serial >> shift) & 0x7F for next_serial in (next(_serial),) for shift in range(0, 56, 7)]
        yield self._head + ((np.array(digits, dtype=np.uint16)) | 0x3C00).tobytes()
        for i in range(2 * len(digits), len(self._tensors), _CHUNK):
            yield self._tensors[i : i + _CHUNK]

    def write(self, folder: Path) -> Path:
        """Write a folder as PEFT does."""
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_bytes(self.config)
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.writelines(self.cut())
        return folder
