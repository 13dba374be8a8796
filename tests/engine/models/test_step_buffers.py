"""The tensors of a step, written into memory that stays, are those that would be made anew, whatever came before."""

from __future__ import annotations

import itertools
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow
from loraplex_engine.models import step_buffers
from loraplex_engine.models.step_buffers import StepBuffers
from loraplex_engine.wire.messages import SamplingParams

_SIZE = 4
_MAX_TOKENS = 400

# of each step its requests, each with whether it starts over and how many tokens it computes
_STEPS = st.lists(
    st.dictionaries(st.integers(0, 40), st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=20),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=examples(30))
@given(_STEPS)
def test_a_step_is_that_of_new_buffers(steps: list[dict[int, tuple[bool, int]]]) -> None:
    requests: dict[int, Request] = {}
    free = itertools.count(7)
    # so little room that it grows again and again
    with patch.multiple(step_buffers, _MIN_REQUESTS=1, _MIN_BLOCKS=1):
        buffers = StepBuffers(_SIZE)
    for step in steps:
        rows = []
        for index, (starts_over, num_tokens) in step.items():
            request = requests.setdefault(index, _request(index))
            if starts_over:
                request.num_computed, request.block_ids = 0, []
            start, stop = request.num_computed, min(request.num_computed + num_tokens, request.num_tokens)
            if start == stop:
                request.output_ids.append(1000 * index + stop)
                stop += 1
            while len(request.block_ids) * _SIZE < stop:
                request.block_ids.append(next(free))
            rows.append(PlannedRow(request, start, stop - start, samples=True))
            request.num_computed = stop
        _check(buffers, rows)
        # every request gets its next token, alone in its row
        for row in rows:
            row.request.output_ids.append(row.stop)


def _request(index: int) -> Request:
    return Request(str(index), [100 * index + i for i in range(index % 9 + 1)], SamplingParams(_MAX_TOKENS))


def _check(buffers: StepBuffers, rows: list[PlannedRow]) -> None:
    inputs = buffers.fill(rows, None)
    places = [(row.request, position) for row in rows for position in range(row.start, row.stop)]
    assert inputs.token_ids.tolist() == [(r.prompt_ids + r.output_ids)[p] for r, p in places]
    assert inputs.positions.tolist() == [p for _, p in places]
    assert inputs.cells.tolist() == [r.block_ids[p // _SIZE] * _SIZE + p % _SIZE for r, p in places]
    assert inputs.query_start.tolist() == [0, *itertools.accumulate(row.num_tokens for row in rows)]
    assert inputs.context_len.tolist() == [row.stop for row in rows]
    tables = inputs.block_tables.tolist()
    assert [tables[i][: len(row.request.block_ids)] for i, row in enumerate(rows)] == [
        row.request.block_ids for row in rows
    ]
    assert all(tensor.is_contiguous() for tensor in inputs[:6])
