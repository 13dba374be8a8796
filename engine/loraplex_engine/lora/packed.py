"""The packed form of an adapter: one buffer at exact ranks, and where each module's A and B lie in it.

Written by the loader process, mapped by the core. A is [rank, in_features], B is stored [rank, out_features], both
contiguous in the model's dtype, each starting at a multiple of 64 bytes. Knows no torch.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import msgspec

ALIGNMENT = 64
"""Bytes; a cache line, and enough for the widest vector loads."""


class PackedModule(msgspec.Struct, frozen=True, array_like=True):
    """One module of a packed adapter; starts are byte offsets, -1 where it has no such vector or matrix.

    y = g * (y + scaling * (x A^T) B) + c. Rank 0: no A and B, only the epilogue. An embedding's A is stored
    [vocabulary, rank], so that a token's row is a gather. g and c are float32 [out_features], whatever the dtype.
    """

    layer: int
    group: int
    slice_id: int
    rank: int
    scaling: float
    in_features: int
    out_features: int
    a_start: int
    b_start: int
    g_start: int = -1
    c_start: int = -1


class PackedNorm(msgspec.Struct, frozen=True, array_like=True):
    """The gain of a norm that stands in place of the base's, [width] in the model's dtype."""

    path: str
    width: int
    start: int


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [num_rows, width] in the model's dtype in place of those of the embedding or the head.

    `token_ids` says which rows, all different; empty: all of them, in order.
    """

    group: int
    token_ids: tuple[int, ...]
    num_rows: int
    width: int
    start: int


class LoadJob(msgspec.Struct, frozen=True, tag="job"):
    """Ask the loader for a digest."""

    digest: str


class LoadDone(msgspec.Struct, frozen=True, tag="done"):
    """The adapter lies packed in a file without a name, whose descriptor follows; seconds of each stage."""

    digest: str
    num_bytes: int
    rank: int
    modules: tuple[PackedModule, ...]
    fetch_s: float
    verify_s: float
    pack_s: float
    norms: tuple[PackedNorm, ...] = ()
    rows: tuple[PackedRows, ...] = ()
    invocation_ids: tuple[int, ...] = ()
    table: bytes = b""
    """The modules once more, as an array of `MODULE_ROW` that is ready for the table."""
    replaced_bytes: int = 0
    """Of `num_bytes`, what stands in place of weights of the base."""
    disk_adapters: int = 0
    """Adapters in the disk cache after this load, of `disk_bytes` bytes in all."""
    disk_bytes: int = 0
    disk_evictions: int = 0
    """Adapters pushed out of the disk cache since the loader's last success."""


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The adapter could not be loaded; `is_content` says that its bytes are to blame, not the surroundings."""

    digest: str
    stage: str
    code: str
    message: str
    is_content: bool


class LoadBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The loader has jobs and is at work, however long they take."""


LoadResult = LoadDone | LoadFailed
LoaderMessage = LoadResult | LoadBeat


@dataclass(frozen=True, eq=False, slots=True)
class PackedAdapter:
    """An adapter in host memory; the mapping lives as long as somebody holds this."""

    facts: LoadDone
    buffer: mmap.mmap

    @property
    def digest(self) -> str:
        """Identity of the adapter version."""
        return self.facts.digest

    @property
    def replaced_bytes(self) -> int:
        """Host memory of the norms, embedding and head rows that stand in place of the base's."""
        return self.facts.replaced_bytes

    @property
    def lora_bytes(self) -> int:
        """Host memory of everything else: A, B and the epilogue's vectors."""
        return self.facts.num_bytes - self.facts.replaced_bytes


def map_packed(facts: LoadDone, descriptor: int) -> PackedAdapter:
    """Map the loader's file; the descriptor is closed, so the memory goes when the mapping does.

    Raises:
        OSError: The file is shorter than announced.
    """
    try:
        if os.fstat(descriptor).st_size < facts.num_bytes:
            raise OSError(f"packed adapter {facts.digest} is shorter than announced")
        return PackedAdapter(facts, mmap.mmap(descriptor, facts.num_bytes))
    finally:
        os.close(descriptor)
