"""The tensors of a step, at addresses that stay from step to step: filling them costs less than making new ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow

_MIN_TOKENS, _MIN_REQUESTS, _MIN_BLOCKS = 64, 16, 64
_MAX_SHAPES = 256

Views = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class StepBuffers:
    """Room for one step after the other, which grows with them; what `fill` returned is valid until the next call."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: positions of one KV block."""
        self._block_size = block_size
        self._shape_to_views: dict[tuple[int, int], Views] = {}
        self._reserve_tokens(_MIN_TOKENS)
        self._reserve_requests(_MIN_REQUESTS, _MIN_BLOCKS)

    def fill(self, rows: Sequence[PlannedRow], adapters: AdapterRows | None) -> StepInputs:
        """Write the tokens of a step, their places, and what each request has computed.

        Args:
            rows: of the step, each with blocks for all of its tokens.
            adapters: which of the tokens use which adapter.
        """
        num_requests, num_tokens = len(rows), sum([row.num_tokens for row in rows])
        if num_tokens > len(self._tokens[0]):
            self._reserve_tokens(2 * num_tokens)
        if num_requests > len(self._context_len):
            self._reserve_requests(2 * num_requests, self._tables.shape[1])
        self._fill_tables(rows)
        if num_tokens == num_requests:
            self._fill_decoding(rows)
        else:
            self._fill_chunks(rows)
        shape = num_tokens, num_requests
        views = self._shape_to_views.get(shape) or self._view(shape)
        return StepInputs(*views, adapters)

    def _fill_decoding(self, rows: Sequence[PlannedRow]) -> None:
        """Each request has one token: plain lists, since a loop of array operations would take many times as long."""
        size, stop = self._block_size, len(rows)
        token_ids, positions, cells = self._tokens
        starts = [row.start for row in rows]
        token_ids[:stop] = [_token_at(row.request, row.start) for row in rows]
        positions[:stop] = starts
        cells[:stop] = [row.request.block_ids[row.start // size] * size + row.start % size for row in rows]
        self._query_start[: stop + 1] = range(stop + 1)
        self._context_len[:stop] = [start + 1 for start in starts]

    def _fill_chunks(self, rows: Sequence[PlannedRow]) -> None:
        size, stop = self._block_size, 0
        token_ids, positions, cells = self._tokens
        for index, row in enumerate(rows):
            start, stop = stop, stop + row.num_tokens
            places = np.arange(row.start, row.stop)
            token_ids[start:stop] = row.request.token_ids(row.start, row.stop)
            positions[start:stop] = places
            cells[start:stop] = self._tables[index][places // size].astype(np.int64) * size + places % size
        self._query_start[: len(rows) + 1] = [0, *itertools.accumulate(row.num_tokens for row in rows)]
        self._context_len[: len(rows)] = [row.stop for row in rows]

    def _fill_tables(self, rows: Sequence[PlannedRow]) -> None:
        """Write the blocks that a request has gained since the step before, where it is in the same row."""
        for index, row in enumerate(rows):
            block_ids = row.request.block_ids
            # NOTE: a request's list of blocks only grows; one that starts over gets another list
            num_known = self._num_known[index] if self._known[index] is block_ids else 0
            if num_known == len(block_ids):
                continue
            if len(block_ids) > self._tables.shape[1]:
                self._reserve_requests(len(self._context_len), 2 * len(block_ids))
                return self._fill_tables(rows)
            self._tables[index, num_known : len(block_ids)] = block_ids[num_known:]
            self._known[index], self._num_known[index] = block_ids, len(block_ids)
        return None

    def _view(self, shape: tuple[int, int]) -> Views:
        """The tensors of a step of so many tokens and requests."""
        num_tokens, num_requests = shape
        if len(self._shape_to_views) >= _MAX_SHAPES:
            self._shape_to_views.clear()
        token_ids, positions, cells = torch.from_numpy(self._tokens)[:, :num_tokens]
        views = (
            token_ids,
            positions,
            cells,
            torch.from_numpy(self._tables)[:num_requests],
            torch.from_numpy(self._query_start)[: num_requests + 1],
            torch.from_numpy(self._context_len)[:num_requests],
        )
        self._shape_to_views[shape] = views
        return views

    def _reserve_tokens(self, max_tokens: int) -> None:
        # token ids, positions, cells
        self._tokens = np.zeros((3, max_tokens), dtype=np.int64)
        self._shape_to_views.clear()

    def _reserve_requests(self, max_requests: int, max_blocks: int) -> None:
        self._tables = np.zeros((max_requests, max_blocks), dtype=np.int32)
        self._query_start = np.zeros(max_requests + 1, dtype=np.int32)
        self._context_len = np.zeros(max_requests, dtype=np.int32)
        # the lists of blocks that the rows of the tables were written from, and how much of each
        self._known: list[list[int] | None] = [None] * max_requests
        self._num_known = [0] * max_requests
        self._shape_to_views.clear()


def _token_at(request: Request, position: int) -> int:
    num_prompt = len(request.prompt_ids)
    return request.prompt_ids[position] if position < num_prompt else request.output_ids[position - num_prompt]
