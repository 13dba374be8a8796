"""Who goes first, and who must yield when blocks run out."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_engine.core.request import Request
from loraplex_engine.scheduling.policy import AGEING_S, MAX_PRIORITY, AgeOnly, WaitingLine, choose_victim
from loraplex_engine.wire.messages import SamplingParams
from schedules import World, shape


def _request(name: str, arrival: int = 0, priority: int = 0, at: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(1), priority=priority, arrived_at=at, arrival=arrival)


def _holder(name: str, arrival: int, tenant: str, blocks: list[int], priority: int = 0) -> Request:
    return Request(name, [1], SamplingParams(1), None, tenant, priority, arrival=arrival, block_ids=blocks)


def test_lower_priority_number_starts_first_and_equals_in_order_of_arrival() -> None:
    world = World(max_num_seqs=1, budget=32)
    for name, priority in (("a", 0), ("late", 1), ("b", 0), ("urgent", -1)):
        world.request(name, priority=priority, max_tokens=1)
    assert [shape(world.step()[0])[0][0] for _ in range(4)] == ["urgent", "a", "b", "late"]


def test_waiting_lifts_a_request_by_one_priority_every_few_seconds() -> None:
    line = WaitingLine()
    old = _request("old", 0, priority=2, at=0.0)
    line.add(old)
    line.add(_request("just before", 1, at=2 * AGEING_S - 0.1))
    line.add(_request("just after", 2, at=2 * AGEING_S + 0.1))
    assert [request.request_id for request in line] == ["just before", "old", "just after"]
    line.remove(old)
    assert len(line) == 2
    assert old not in line


@pytest.mark.parametrize("priority", [MAX_PRIORITY, 10**9])
def test_no_priority_waits_for_ever(priority: int) -> None:
    line = WaitingLine()
    line.add(_request("patient", 0, priority, at=0.0))
    line.add(_request("urgent", 1, -(10**9), at=2 * MAX_PRIORITY * AGEING_S + 0.1))
    assert next(iter(line)).request_id == "patient"


class TakeTurns(AgeOnly):
    """One request of each tenant after the other."""

    def arrange(self, line: list[Request]) -> list[Request]:
        seen: Counter[str] = Counter()
        turns = []
        for request in line:
            turns.append((seen[request.tenant_id], request))
            seen[request.tenant_id] += 1
        return [request for _, request in sorted(turns, key=lambda turn: turn[0])]


def test_tenants_take_the_turns_that_a_share_gives_them() -> None:
    names = {}
    for share in (None, TakeTurns()):
        world = World(num_blocks=64, budget=64, share=share)
        for index, tenant in enumerate("aaab"):
            world.request(f"{tenant}{index}", [index + 1], tenant=tenant, max_tokens=1)
        names[share is None] = [row.request.request_id for row in world.step()[0].rows]
    assert names == {True: ["a0", "a1", "a2", "b3"], False: ["a0", "b3", "a1", "a2"]}


def test_preempted_request_waits_in_its_old_place() -> None:
    world = World(num_blocks=4, budget=32)
    world.request("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    world.request("young", [11, 12, 13, 14, 15, 16, 17], max_tokens=9)
    world.step()
    world.request("newcomer", [21, 22], max_tokens=1)
    while not any(request.preemptions for request in world.scheduler.waiting):
        world.step()
    assert [request.request_id for request in world.scheduler.waiting] == ["young", "newcomer"]


@pytest.mark.parametrize(
    ("needy", "victim"),
    [("a0", "b2"), ("a1", "b2"), ("b1", "b2"), ("b2", "b2")],
)
def test_greediest_tenant_loses_its_youngest(needy: str, victim: str) -> None:
    running = {
        name: _holder(name, arrival, name[0], list(range(arrival * 10, arrival * 10 + count)))
        for arrival, (name, count) in enumerate([("a0", 9), ("b1", 3), ("a1", 2), ("b2", 2), ("c0", 4)])
    }
    assert choose_victim(running.values(), running[needy]) is running[victim]


def test_shared_blocks_make_nobody_greedy_twice() -> None:
    first = _holder("first", 0, "z", [90])
    sharers = [_holder(f"s{i}", i, "s", [1, 2, 3]) for i in (1, 2, 3)]
    other = _holder("other", 4, "o", [11, 12, 13, 14])
    assert choose_victim([first, *sharers, other], first) is other


def test_least_urgent_of_the_greediest_yields_before_its_youngest() -> None:
    running = [_holder("oldest", 0, "t", [0]), _holder("slow", 1, "t", [1], priority=1), _holder("young", 2, "t", [2])]
    assert choose_victim(running, running[0]).request_id == "slow"


def test_lone_running_request_is_its_own_victim() -> None:
    alone = _holder("alone", 0, "t", [0])
    assert choose_victim([alone], alone) is alone


@given(seed=st.integers(0, 10**6), num_blocks=st.integers(6, 14), size=st.integers(2, 9))
def test_oldest_request_is_never_preempted_and_everybody_ends(seed: int, num_blocks: int, size: int) -> None:
    chance = random.Random(seed)
    world = World(num_blocks=num_blocks, budget=16, max_num_seqs=size)
    ended: list[str] = []
    for index in range(12):
        prompt = [chance.randrange(1, 4) for _ in range(chance.randint(1, 12))]
        tenant, priority = chance.choice("ab"), chance.choice([0, 0, 0, 1, -1])
        world.request(str(index), prompt, None, chance.randint(1, 10), tenant, priority, ignore_eos=True)
    for _ in range(400):
        oldest = min(world.scheduler.running, key=lambda r: r.arrival, default=None)
        before = oldest.preemptions if oldest is not None else 0
        _, events = world.step(chance.randrange(1, 4))
        assert oldest is None or oldest.preemptions == before
        ended += [event.request_id for event in events if event.finish]
    assert sorted(ended) == sorted(map(str, range(12)))
    assert world.pool.num_free == num_blocks
