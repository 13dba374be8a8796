from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex_engine.scheduling.advice import Advisor, EngineLoad, advise
from loraplex_engine.scheduling.cost import StepCost
from loraplex_engine.scheduling.load import CpuMeter, LoadReader
from schedules import Clock, World

CALM = EngineLoad(
    num_running=8,
    kv_usage_ratio=0.4,
    num_preemptions=7,
    num_steps=1000,
    num_full_steps=100,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    max_loras=8,
    cpu_threads=2,
    kv_cache_bytes=2 << 30,
)

BLOCKS = "raise --kv-cache-memory-bytes (now 2.0 GiB) or lower --max-num-seqs (now 16) or --max-model-len (now 8192)"

TABLE = {
    "blocks ran out": (
        {"num_waiting": 12, "oldest_wait_s": 3.0, "kv_usage_ratio": 0.97, "num_preemptions": 47},
        f"12 requests wait, the KV cache is 97% full and 40 requests were preempted in the last 30 s: {BLOCKS}",
    ),
    "one waits for blocks": (
        {"num_waiting": 1, "oldest_wait_s": 1.0, "kv_usage_ratio": 0.9},
        f"1 request waits, the KV cache is 90% full and 0 requests were preempted in the last 30 s: {BLOCKS}",
    ),
    "one was preempted, nobody waits": (
        {"kv_usage_ratio": 0.95, "num_preemptions": 8},
        f"0 requests wait, the KV cache is 95% full and 1 request was preempted in the last 30 s: {BLOCKS}",
    ),
    "seats are taken": (
        {"num_waiting": 5, "oldest_wait_s": 4.2, "num_running": 16, "kv_usage_ratio": 0.2},
        "5 requests wait, the longest for 4.2 s, though the KV cache is only 20% full: raise --max-num-seqs (now 16)",
    ),
    "adapters take turns": (
        {"num_overcommitted": 12, "oldest_slot_wait_s": 2.5},
        "20 adapters take turns in 8 slots and the longest wait is 2.5 s: raise --max-loras (now 8)",
    ),
    "steps are full": (
        {"num_steps": 1040, "num_full_steps": 120, "num_waiting": 2, "oldest_wait_s": 1.5},
        (
            "2 requests wait and 20 of 40 steps in the last 30 s had all the tokens that they may have: raise "
            "--max-num-batched-tokens (now 2048)"
        ),
    ),
    "cores are used by others": (
        {"slowness": 2.4, "other_cores": 1.3},
        (
            "steps take 2.4 times as long as when the engine started while other processes use 1.3 cores: stop them, "
            "or lower --cpu-threads (now 2)"
        ),
    ),
    # one condition less
    "nothing happens": ({}, None),
    "full but nobody waits": ({"kv_usage_ratio": 1.0}, None),
    "a moment's wait": ({"num_waiting": 5, "oldest_wait_s": 0.9, "num_running": 16}, None),
    "waits beside free seats": ({"num_waiting": 5, "oldest_wait_s": 9.0, "num_running": 15}, None),
    "seats are taken and so are blocks": (
        {"num_waiting": 5, "oldest_wait_s": 9.0, "num_running": 16, "kv_usage_ratio": 0.8},
        None,
    ),
    "adapters take turns quickly": ({"num_overcommitted": 12, "oldest_slot_wait_s": 0.5}, None),
    "few steps are full": (
        {"num_steps": 1040, "num_full_steps": 119, "num_waiting": 2, "oldest_wait_s": 1.5},
        None,
    ),
    "full steps, but few": (
        {"num_steps": 1019, "num_full_steps": 119, "num_waiting": 2, "oldest_wait_s": 1.5},
        None,
    ),
    "full steps that nobody waits for": ({"num_steps": 1040, "num_full_steps": 140}, None),
    "slow by itself": ({"slowness": 2.4, "other_cores": 0.4}, None),
    "busy machine, good pace": ({"slowness": 1.4, "other_cores": 2.0}, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_advice_names_the_lever_with_figures(name: str) -> None:
    changes, text = TABLE[name]
    found = [text for _, text in advise(CALM, replace(CALM, **changes), 30.0)]  # type: ignore[arg-type]
    assert found == ([] if text is None else [text])


class Watched:
    """An advisor, the time, and the counters that it reads."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.load = CALM
        self.num_reads = 0
        self.advisor = Advisor(self.read, self.clock, self.said.append)
        self.num_reads = 0

    def read(self) -> EngineLoad:
        self.num_reads += 1
        return self.load

    def look(self, after_s: float = 0.0, num_step_tokens: int = 100, **changes: float) -> None:
        self.clock.now += after_s
        self.load = replace(self.load, **changes)  # type: ignore[arg-type]
        self.advisor.look(num_step_tokens)


QUEUE = {"num_waiting": 5, "oldest_wait_s": 4.2, "num_running": 16, "kv_usage_ratio": 0.2}


def test_each_kind_is_said_once_a_minute_and_kept_while_it_holds() -> None:
    world = Watched()
    world.look(**QUEUE)
    assert len(world.said) == 1
    for _ in range(59):
        world.look(1.0)
    assert len(world.said) == 1
    assert world.advisor.current == world.said
    world.look(1.0, num_overcommitted=4, oldest_slot_wait_s=3.0)
    assert [text.split(":")[1] for text in world.said] == [
        " raise --max-num-seqs (now 16)",
        " raise --max-num-seqs (now 16)",
        " raise --max-loras (now 8)",
    ]
    world.look(1.0, num_waiting=0, num_overcommitted=0)
    assert world.advisor.current == []


def test_counters_are_read_once_a_second_at_most() -> None:
    world = Watched()
    for _ in range(35):
        world.look(0.1)
    assert world.num_reads == 4


def test_preemptions_count_for_half_a_minute() -> None:
    world = Watched()
    world.look(kv_usage_ratio=0.95)
    world.look(1.0, num_preemptions=9)
    for _ in range(29):
        world.look(1.0)
        assert "2 requests were preempted" in world.advisor.current[0]
    world.look(1.0)
    world.look(1.0)
    assert world.advisor.current == []


def test_after_a_long_pause_nothing_is_compared_with_before_it() -> None:
    world = Watched()
    world.look()
    world.look(600.0, num_preemptions=99, kv_usage_ratio=0.95)
    assert world.advisor.current == []


def test_steps_are_counted_by_their_tokens() -> None:
    world = Watched()
    world.look(num_waiting=1, oldest_wait_s=2.0)
    for _ in range(20):
        world.look(0.1, num_step_tokens=2048)
        world.look(0.1, num_step_tokens=2047)
        world.look(0.1, num_step_tokens=0)
    world.look(1.0, num_step_tokens=0)
    assert "20 of 40 steps" in world.advisor.current[0]


def test_counters_are_those_of_the_scheduler(tmp_path: Path) -> None:
    world = World(num_blocks=4, num_slots=1, budget=32, max_num_seqs=3)
    reader = LoadReader(
        world.scheduler,
        world.pool,
        StepCost(),
        CALM,
        world.clock,
        CpuMeter(tmp_path / "none", lambda: 0.0, world.clock),
    )
    world.load("d1", "d2")
    for name, digest in (("a", "d1"), ("b", "d2"), ("c", None), ("d", None), ("e", None)):
        world.request(name, 4, digest, max_tokens=12)
    world.step()
    world.clock.now += 3.0
    load = reader()
    assert load == replace(
        CALM,
        num_running=3,
        num_waiting=2,
        oldest_wait_s=3.0,
        kv_usage_ratio=world.pool.usage_ratio,
        num_preemptions=0,
        num_overcommitted=1,
        oldest_slot_wait_s=3.0,
        slowness=1.0,
    )


def test_meter_tells_the_cores_of_others_from_our_own(tmp_path: Path) -> None:
    clock, stat, own_s = Clock(), tmp_path / "stat", [0.0]
    stat.write_text("cpu  1000 0 0 5000 0 0 0 0 0 0\ncpu0 1 2\n")
    meter = CpuMeter(stat, lambda: own_s[0], clock)
    clock.now += 2.0
    own_s[0] += 1.0
    stat.write_text("cpu  1200 100 50 5100 77 25 25 0 0 0\ncpu0 1 2\n")
    assert meter.read() == pytest.approx(1.5)
    clock.now += 1.0
    assert meter.read() == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu what is this"])
def test_meter_says_nothing_where_the_kernel_says_nothing(tmp_path: Path, text: str | None) -> None:
    clock, stat = Clock(), tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    meter = CpuMeter(stat, lambda: 5.0, clock)
    clock.now += 1.0
    assert meter.read() == 0.0
