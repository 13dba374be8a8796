"""The tensors of a base as views into the mapping of its files.

Nothing is read before it is used, nothing is copied: a view's pages are the page cache's. Whoever packs a tensor into
a form of its own calls `release` afterwards, so that the two are not in memory at once. Views are for reading; a write
would change a private page and never the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from loraplex_engine.weights.index import TensorEntry, read_index

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource:
    """All tensors of the base in `folder`, one safetensors file or shards.

    Raises:
        BaseUnsupportedError: a file is not whole, or has a dtype that is not served.
    """

    def __init__(self, folder: Path) -> None:
        self._index = read_index(folder)
        self._mappings = {file: _map(file) for file in {entry.file for entry in self._index.values()}}

    def get(self, name: str) -> Tensor:
        """A view of the tensor in the dtype of the file."""
        entry = self._index[name]
        flat = torch.frombuffer(
            self._mappings[entry.file], dtype=_DTYPES[entry.dtype], count=prod(entry.shape), offset=entry.start
        )
        return flat.view(entry.shape)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`: the view itself if the file has that dtype, else a converted copy."""
        return self.get(name).to(dtype)

    def read_fused(self, names: Iterable[str], dtype: torch.dtype) -> Tensor:
        """The tensors below one another in one new tensor, converted on the way; their pages are released."""
        names = list(names)
        shapes = [self._index[name].shape for name in names]
        fused = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype)
        for name, rows in zip(names, torch.split(fused, [shape[0] for shape in shapes]), strict=True):
            rows.copy_(self.get(name))
            self.release(name)
        return fused

    def release(self, name: str) -> None:
        """Let go of the tensor's pages; a view of it reads them again from the file when touched."""
        entry = self._index[name]
        start, length = _whole_pages(entry)
        if length > 0:
            self._mappings[entry.file].madvise(mmap.MADV_DONTNEED, start, length)

    def release_all(self) -> None:
        """Let go of the pages of every tensor; what is still viewed is read again when touched."""
        for name in self._index:
            self.release(name)


def _map(file: Path) -> mmap.mmap:
    # private and writable, because torch warns about memory that it may not write to
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _whole_pages(entry: TensorEntry) -> tuple[int, int]:
    """Start and length of the pages that hold nothing but this tensor."""
    start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = entry.stop // mmap.PAGESIZE * mmap.PAGESIZE
    return start, stop - start
