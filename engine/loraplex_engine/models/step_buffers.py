"""The tensors of a step, at addresses that stay from step to step: filling them costs less than making new ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.step import PlannedRow

_MIN_REQUESTS, _MIN_BLOCKS = 16, 64
_MAX_SHAPES = 64


class StepBuffers:
    """Room for one step after the other; what `fill` returned is valid until it is called again."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: positions of one KV block."""
        self._block_size = block_size
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._reserve_tables(_MIN_REQUESTS, _MIN_BLOCKS)

    def fill(self, rows: Sequence[PlannedRow], adapters: AdapterRows | None) -> StepInputs:
        """Write the tokens of a step, their places, and what each request has computed.

        Args:
            rows: of the step, each with blocks for all of its tokens.
            adapters: which of the tokens use which adapter.
        """
        num_requests, num_tokens = len(rows), sum([row.num_tokens for row in rows])
        if num_requests > len(self._tables):
            self._reserve_tables(2 * num_requests, self._tables.shape[1])
        self._fill_tables(rows)
        shape = self._shapes.get((num_tokens, num_requests)) or self._make_shape(num_tokens, num_requests)
        if num_tokens == num_requests:
            self._fill_decoding(shape, rows)
        else:
            self._fill_chunks(shape, rows)
        return shape.inputs._replace(adapters=adapters) if adapters is not None else shape.inputs

    def _fill_decoding(self, shape: _Shape, rows: Sequence[PlannedRow]) -> None:
        """Each request has one token: plain lists, since a loop of array operations would take many times as long."""
        size = self._block_size
        token_ids, starts, cells = [], [], []
        for request, start, _, _, _ in rows:
            behind_prompt = start - len(request.prompt_ids)
            token_ids.append(request.output_ids[behind_prompt] if behind_prompt >= 0 else request.prompt_ids[start])
            starts.append(start)
            cells.append(request.block_ids[start // size] * size + start % size)
        shape.tokens[:] = token_ids + starts + cells
        shape.context_len[:] = [start + 1 for start in starts]

    def _fill_chunks(self, shape: _Shape, rows: Sequence[PlannedRow]) -> None:
        size, stop = self._block_size, 0
        token_ids, positions, cells = shape.tokens.reshape(3, -1)
        for index, row in enumerate(rows):
            start, stop = stop, stop + row.num_tokens
            places = np.arange(row.start, row.stop)
            token_ids[start:stop] = row.request.token_ids(row.start, row.stop)
            positions[start:stop] = places
            cells[start:stop] = self._tables[index][places // size].astype(np.int64) * size + places % size
        shape.query_start[:] = [0, *itertools.accumulate(row.num_tokens for row in rows)]
        shape.context_len[:] = [row.stop for row in rows]

    def _fill_tables(self, rows: Sequence[PlannedRow]) -> None:
        """Write the blocks that a request has gained since the step before, where it is in the same row."""
        known, num_known = self._known, self._num_known
        for index, row in enumerate(rows):
            # NOTE: a request's list of blocks only grows; one that starts over gets another list
            block_ids = row.request.block_ids
            if known[index] is block_ids and num_known[index] == len(block_ids):
                continue
            if len(block_ids) > self._tables.shape[1]:
                self._reserve_tables(len(self._tables), 2 * len(block_ids))
                return self._fill_tables(rows)
            start = num_known[index] if known[index] is block_ids else 0
            self._tables[index, start : len(block_ids)] = block_ids[start:]
            known[index], num_known[index] = block_ids, len(block_ids)
        return None

    def _make_shape(self, num_tokens: int, num_requests: int) -> _Shape:
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        shape = self._shapes[num_tokens, num_requests] = _Shape(num_tokens, num_requests, self._tables)
        return shape

    def _reserve_tables(self, max_requests: int, max_blocks: int) -> None:
        self._tables = np.zeros((max_requests, max_blocks), dtype=np.int32)
        # the lists of blocks that the rows were written from, and how much of each
        self._known: list[list[int] | None] = [None] * max_requests
        self._num_known = [0] * max_requests
        self._shapes.clear()


class _Shape:
    """The memory of steps of so many tokens and requests, for writing as arrays and for reading as tensors."""

    def __init__(
        self, num_tokens: int, num_requests: int, tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    ) -> None:
        # token ids, positions, cells
        self.tokens = np.zeros(3 * num_tokens, dtype=np.int64)
        # as in a step in which every request has one token
        self.query_start = np.arange(num_requests + 1, dtype=np.int32)
        self.context_len = np.zeros(num_requests, dtype=np.int32)
        token_ids, positions, cells = torch.from_numpy(self.tokens).view(3, -1)
        self.inputs = StepInputs(
            token_ids,
            positions,
            cells,
            torch.from_numpy(tables)[:num_requests],
            torch.from_numpy(self.query_start),
            torch.from_numpy(self.context_len),
            None,
        )
