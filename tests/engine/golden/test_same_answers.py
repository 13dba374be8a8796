"""The same request has the same tokens whichever way the engine takes: chunks, preemption, a cached prefix."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engines import SEVEN, EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.wire.messages import TokenEvent, TokenLogprobs
from support import write_adapter

PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": ((9, -100.0),)}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"temperature": 1.3, "seed": 8},
    {**PENALTIES, "logprobs": 2},
    {**PENALTIES, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 9, "min_tokens": 5, "logprobs": 0},
]

Answer = tuple[list[int], list[TokenLogprobs]]


class Case:
    """Nine requests on three adapters and the base, greedy and seeded, some with penalties and log-probabilities."""

    def __init__(self, base: Path, tmp: Path, dtype: str) -> None:
        self.base, self.tmp, self.dtype = base, tmp, dtype
        self.folders = [write_adapter(tmp / f"a{i}", base, rank=4 + 4 * i, targets=SEVEN, seed=i) for i in range(3)]
        rng = random.Random(3)
        self.prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(20, 60))] for _ in range(9)]

    def answers(self, rounds: int = 1, **settings: Any) -> tuple[EngineWorld, list[Answer]]:
        """What every request got in the last of some rounds over one engine."""
        world = EngineWorld(self.base, self.tmp / "cache", dtype=self.dtype, cpu_threads=1, **settings)
        digests = [None, *map(world.put, self.folders)]
        answers: list[Answer] = []
        for _ in range(rounds):
            requests = [world.request(ids, digests[i % 4], 24, **PARAMS[i % 5]) for i, ids in enumerate(self.prompts)]
            events = world.run(requests)
            answers = [_read(events[request.request_id]) for request in requests]
        return world, answers


def _read(events: list[TokenEvent]) -> Answer:
    return text_ids(events), [logprobs for event in events for logprobs in event.logprobs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tmp = tmp_path_factory.mktemp("same")
    return Case(pull(str(tiny_llama), tmp / "bases"), tmp, request.param)


@pytest.fixture(scope="module")
def expected(case: Case) -> list[Answer]:
    return case.answers(enable_prefix_caching=False)[1]


def test_answers_are_long_and_differ(expected: list[Answer]) -> None:
    assert [len(token_ids) for token_ids, _ in expected] == [24] * 9
    assert [len(logprobs) for _, logprobs in expected] == [24 * (i % 5 > 2) for i in range(9)]
    assert len({tuple(token_ids) for token_ids, _ in expected}) == 9


def test_small_chunks_change_nothing(case: Case, expected: list[Answer]) -> None:
    assert case.answers(max_num_batched_tokens=11, max_num_seqs=9)[1] == expected


def test_few_at_a_time_change_nothing(case: Case, expected: list[Answer]) -> None:
    assert case.answers(max_num_seqs=2)[1] == expected


def test_one_slot_for_three_adapters_changes_nothing_but_the_order(case: Case, expected: list[Answer]) -> None:
    world, answers = case.answers(max_loras=1)
    assert answers == expected
    assert world.engine.residency.slots.num_evictions >= 2


def test_cached_prefixes_change_nothing(case: Case, expected: list[Answer]) -> None:
    world, answers = case.answers(rounds=2)
    assert answers == expected
    assert world.engine.scheduler.num_prefix_hits >= 9 * 16


def test_preemption_changes_nothing(case: Case, expected: list[Answer]) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 20 * (4 if case.dtype == "float32" else 2)
    world, answers = case.answers(kv_cache_memory_bytes=12 * block_bytes)
    assert answers == expected
    assert world.engine.scheduler.num_preemptions > 0


def test_yielding_to_other_tenants_changes_nothing(case: Case, expected: list[Answer]) -> None:
    world = EngineWorld(case.base, case.tmp / "cache", dtype=case.dtype, cpu_threads=1, max_num_seqs=4)
    digests = [None, *map(world.put, case.folders)]
    requests = [world.request(ids, digests[i % 4], 24, **PARAMS[i % 5]) for i, ids in enumerate(case.prompts)]
    told: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for index, request in enumerate(requests):
        # four of one tenant that take all seats, then one of another every few steps
        request.tenant_id = "flood" if index < 4 else f"t{index % 2}"
        world.engine.add(request)
        for _ in range((0, 0, 0, 8)[index] if index < 4 else 3):
            for event in world.engine.step():
                told[event.request_id].append(event)
    for request_id, events in world.finish([request.request_id for request in requests]).items():
        told[request_id] += events
    assert [_read(told[request.request_id]) for request in requests] == expected
    assert world.engine.scheduler.num_yields >= 2
