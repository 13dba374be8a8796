"""What adapters cost for nothing: rows and ranks computed only to fill the tiles, bytes between their matrices.

`PaddingMeter` is kept by the engine. What a form rounds up to is data here; see `Tile`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUP_INDEX
from loraplex_engine.lora.packed import LoadDone, PackedModule

_VECTOR_ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """What a form of shrink and expand rounds up to: `rows` of a segment (None: all rows of the step) and ranks."""

    rows: int | None
    ranks: int


EXACT = Tile(1, 1)
FORM_TO_TILE: Mapping[str, Tile] = {
    "native": EXACT,
    "naive": EXACT,
    "torch": Tile(None, 1),
    "triton": Tile(16, 16),
}


@dataclass(frozen=True, slots=True)
class RowWork:
    """Multiply-adds for one row of an adapter: those that its modules need, and those that a form computes."""

    needed: int
    computed: int


class PaddingMeter:
    """Padding of the steps and of the adapters in slots, in the form that serves.

    Args:
        form: name of the form, one of `FORM_TO_TILE`.
        itemsize: bytes of a number in the model's dtype.
        find_facts: what the loader found out about a digest.
    """

    def __init__(self, form: str, itemsize: int, find_facts: Callable[[str], LoadDone]) -> None:
        self._tile = FORM_TO_TILE.get(form, EXACT)
        self._itemsize = itemsize
        self._find_facts = find_facts
        # a digest is its content, so what was worked out for it stays true
        self._work_of = functools.lru_cache(maxsize=1024)(self._measure)
        self._observed: Mapping[str, int] = {}
        self.step_ratio = 0.0
        """Of the last step with rows of adapters."""

    def observe_step(self, digest_to_rows: Mapping[str, int]) -> None:
        """Take in how many rows of each adapter a step had."""
        if digest_to_rows and digest_to_rows != self._observed:
            self._observed = digest_to_rows
            works = [self._work_of(digest) for digest in digest_to_rows]
            self.step_ratio = padding_ratio(list(digest_to_rows.values()), works, self._tile)

    def bytes_ratio(self, digests: Iterable[str]) -> float:
        """Share of the bytes of these adapters that lies between their matrices."""
        facts = [self._find_facts(digest) for digest in digests]
        held = sum(fact.num_bytes for fact in facts)
        needed = sum(needed_bytes(fact, self._itemsize) for fact in facts)
        return max(0.0, 1.0 - needed / held) if held else 0.0

    def _measure(self, digest: str) -> RowWork:
        modules = self._find_facts(digest).modules
        return row_work([(module.rank, _num_features(module)) for module in modules], self._tile)


def row_work(shapes: Sequence[tuple[int, int]], tile: Tile) -> RowWork:
    """Sum over an adapter's modules, given as (rank, input plus output features)."""
    needed = sum(rank * num_features for rank, num_features in shapes)
    computed = sum(_round_up(rank, tile.ranks) * num_features for rank, num_features in shapes)
    return RowWork(needed, computed)


def padding_ratio(lengths: Sequence[int], works: Sequence[RowWork], tile: Tile) -> float:
    """Share of a step's LoRA multiply-adds that are for nothing, 0 to below 1; 0 for no segments.

    Args:
        lengths: rows of each segment.
        works: work of one row of each segment's adapter.
        tile: of the form in use.
    """
    num_rows = sum(lengths)
    needed = sum(length * work.needed for length, work in zip(lengths, works, strict=True))
    computed = sum(
        (num_rows if tile.rows is None else _round_up(length, tile.rows)) * work.computed
        for length, work in zip(lengths, works, strict=True)
    )
    return 1.0 - needed / computed if computed else 0.0


def needed_bytes(facts: LoadDone, itemsize: int) -> int:
    """Bytes of an adapter's numbers without the gaps that align them."""
    numbers = sum(module.rank * (module.in_features + module.out_features) for module in facts.modules)
    numbers += sum(norm.width for norm in facts.norms) + sum(rows.num_rows * rows.width for rows in facts.rows)
    vectors = sum(((m.g_start >= 0) + (m.c_start >= 0)) * m.out_features for m in facts.modules)
    return numbers * itemsize + vectors * _VECTOR_ITEMSIZE


def _num_features(module: PackedModule) -> int:
    """Features that cost a multiply-add each; the embedding's A is only looked up."""
    is_gathered = module.group == GROUP_INDEX[EMBEDDING_GROUP]
    return module.out_features + (0 if is_gathered else module.in_features)


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
