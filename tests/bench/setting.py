"""What the benchmarks measure on: a base, and random adapters of a given rank on given modules."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex_engine.bases.pull import pull
from support import linear_shapes, tiny_llama_config, write_adapter, write_base

QV = ("q_proj", "v_proj")
QVO = ("q_proj", "v_proj", "o_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SEVEN = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CACHE_DIR = Path(os.environ.get("LORAPLEX_CACHE_DIR") or Path.home() / ".cache" / "loraplex")


def open_base(name: str, folder: Path, *, is_tiny: bool) -> Path:
    """The pulled base's folder; a tiny random one, written into `folder`, for smoke tests."""
    if is_tiny:
        return pull(str(write_base(folder / "tiny", tiny_llama_config())), folder / "bases")
    return pull(name, CACHE_DIR)


@dataclass(frozen=True)
class Recipe:
    """Rank and modules of a random adapter."""

    rank: int
    targets: Sequence[str]

    def write(self, folder: Path, base: Path, seed: int) -> Path:
        """Write it as a PEFT folder in bfloat16; the same seed gives the same digest."""
        return write_adapter(folder, base, rank=self.rank, targets=self.targets, seed=seed, std=0.02, dtype="bfloat16")

    def num_parameters(self, base: Path) -> int:
        """Entries of all A and B."""
        shapes = linear_shapes(json.loads((base / "config.json").read_text()))
        return sum(self.rank * sum(shape) for path, shape in shapes.items() if path.rsplit(".", 1)[1] in self.targets)


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """A prompt without special tokens."""
    return [rng.randrange(100, min(vocab_size, 40_000)) for _ in range(length)]
