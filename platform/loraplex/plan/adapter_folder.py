"""Adapters counted in their files: the header of each safetensors file says how many values it has. Reads no tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from loraplex.errors import InvalidRequestError
from loraplex.plan.adapter import AdapterGroup
from loraplex.plan.shape import LAYER_MODULES, OUTER_MODULES
from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.file_rule import WEIGHTS_FILE
from loraplex_registry.peft.header import TensorTable, read_header

_MAX_DEPTH = 3
_MARKS = (".lora_A.", ".lora_embedding_A")


def read_adapter_folder(folder: Path) -> list[AdapterGroup]:
    """Return the adapters in a folder and the folders in it, those of one form together.

    Every tensor of a file counts, also a copy of a base matrix that the registry would drop.

    Raises:
        InvalidRequestError: There is none, or a file is no adapter's.
    """
    counts: Counter[tuple[int, tuple[str, ...], int]] = Counter()
    for path in sorted(_find_files(folder, _MAX_DEPTH)):
        try:
            table = read_header(path)
        except (AdapterFileError, OSError) as error:
            raise InvalidRequestError(f"{path} cannot be read as safetensors: {error}", param="adapter_dir") from error
        counts[_describe(path, table)] += 1
    if not counts:
        raise InvalidRequestError(f"{folder} has no {WEIGHTS_FILE} in it or below it.", param="adapter_dir")
    return [
        AdapterGroup(count=count, rank=rank, modules=modules, num_parameters=num_parameters)
        for (rank, modules, num_parameters), count in sorted(counts.items())
    ]


def _find_files(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        yield folder / WEIGHTS_FILE
    elif depth and folder.is_dir():
        for child in folder.iterdir():
            yield from _find_files(child, depth - 1)


def _describe(path: Path, table: TensorTable) -> tuple[int, tuple[str, ...], int]:
    """Rank, modules and number of values of one adapter."""
    rank, leaves = 0, set()
    for tensor in table.tensors:
        mark = next((mark for mark in _MARKS if mark in tensor.name), None)
        if mark is not None:
            leaves.add(tensor.name.partition(mark)[0].rpartition(".")[2])
            rank = max(rank, tensor.shape[0])
    modules = tuple(name for name in (*LAYER_MODULES, *OUTER_MODULES) if name in leaves)
    if not modules:
        raise InvalidRequestError(f"{path} has no LoRA on a module of a decoder.", param="adapter_dir")
    return rank, modules, sum(math.prod(tensor.shape) for tensor in table.tensors)
