"""Requests that share blocks, copy one, or wait for each other's prefix answer as they would without a cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engines import SEVEN, EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from support import write_adapter

_PARAMS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, {"temperature": 1.3, "seed": 8}]


class Family:
    """Eight prompts of an adapter with a common beginning; some are equal, some part inside a block."""

    def __init__(self, base: Path, tmp: Path, dtype: str) -> None:
        self.base, self.tmp, self.dtype = base, tmp, dtype
        self.folder = write_adapter(tmp / "adapter", base, rank=8, targets=SEVEN, seed=1)
        rng = random.Random(3)
        trunk, ends = ([rng.randrange(3, 300) for _ in range(count)] for count in (40, 3))
        self.prompts = [[*trunk[:length], *ends[:tail]] for length in (40, 40, 37, 21) for tail in (0, 3)]

    def answers(self, *, is_poisoned: bool = False, **settings: Any) -> tuple[EngineWorld, list[list[int]], list[int]]:
        """Tokens of every request, with all of them in the engine at once, and how many of each prompt it had."""
        world = EngineWorld(self.base, self.tmp / "cache", dtype=self.dtype, cpu_threads=1, max_num_seqs=9, **settings)
        digest = world.put(self.folder)
        world.run([world.request([3], digest, 1)])
        if is_poisoned:
            world.engine.poison()
        requests = [world.request(ids, digest, 24, **_PARAMS[i % 3]) for i, ids in enumerate(self.prompts)]
        events = world.run(requests)
        answers = [text_ids(events[request.request_id]) for request in requests]
        return world, answers, [request.num_cached for request in requests]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def family(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    tmp = tmp_path_factory.mktemp("family")
    return Family(pull(str(tiny_llama), tmp / "bases"), tmp, request.param)


@pytest.fixture(scope="module")
def expected(family: Family) -> list[list[int]]:
    return family.answers(enable_prefix_caching=False)[1]


# with 23 the first prompt ends in its second step, which has room for others, and they want a block of that step
@pytest.mark.parametrize("max_num_batched_tokens", [512, 23])
def test_copied_blocks_and_prefixes_in_flight_change_nothing(
    family: Family, expected: list[list[int]], max_num_batched_tokens: int
) -> None:
    world, answers, num_cached = family.answers(max_num_batched_tokens=max_num_batched_tokens)
    assert answers == expected
    scheduler = world.engine.scheduler
    assert scheduler.prefixes.num_waits > 0
    assert scheduler.num_prefix_hits > 7 * 16
    # parts of blocks among them
    assert sum(count % 16 > 0 for count in num_cached) > 3


def test_what_lies_behind_the_copied_part_of_a_block_is_never_read(family: Family, expected: list[list[int]]) -> None:
    assert family.answers(is_poisoned=True)[1] == expected
