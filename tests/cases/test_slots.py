"""Cases of section 3 inside one engine: loads, unloads, slots, tiers. Only the wait varies, never the answer."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from case_world import ADAPTERS, Cases, World
from engines import EngineWorld, text_ids
from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.core.request import Request
from loraplex_engine.errors import ConfigError
from loraplex_engine.slots.table import SlotState
from loraplex_engine.wire.messages import TokenEvent
from loraplex_registry.wire.digest import artifact_path
from support import write_adapter

PROMPT = [(37 * i + 11) % 300 + 3 for i in range(24)]
Long = Callable[[float, float], float]
SIX = ["F01", "F02", "F03", "F04", "F06", "F07"]


@pytest.fixture(scope="module")
def expected(cases: Cases) -> dict[str | None, list[int]]:
    """The answer of each adapter, given alone with room for all, and checked by PEFT."""
    world = cases.world(max_loras=len(ADAPTERS))
    answers: dict[str | None, list[int]] = {}
    for name in (None, *ADAPTERS):
        request = world.ask(name, PROMPT, 40)
        events = world.run([request])[request.request_id]
        world.check_answer(request, events)
        answers[name] = text_ids(events)
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


def slot_of(world: World, name: str) -> SlotState | None:
    digest = world.digest_of[name]
    assert digest is not None
    slot = world.engine.residency.slots.find(digest)
    return None if slot is None else world.engine.residency.slots.slots[slot].state


def drop(world: World, name: str) -> None:
    digest = world.digest_of[name]
    assert digest is not None
    world.engine.residency.drop(digest)


def ids_of(events: list[TokenEvent], request: Request) -> list[int]:
    return text_ids([event for event in events if event.request_id == request.request_id])


@pytest.mark.endure
def test_b048_loading_and_unloading_without_pause_harms_no_stream(
    cases: Cases, expected: dict[str | None, list[int]], long: Long
) -> None:
    world = cases.world(max_loras=4)
    names = ["F01", "F02", "F03", "F04"]
    streams: list[Request] = []
    events: list[TokenEvent] = []
    for number in range(int(long(300, 60_000))):
        while len(streams) < 8:
            streams.append(world.ask("F07", PROMPT, 40))
            world.engine.add(streams[-1])
        if number % 2:
            drop(world, names[number // 2 % 4])
        else:
            digest = world.digest_of[names[number // 2 % 4]]
            assert digest is not None
            world.engine.residency.prefetch(digest)
            world.engine.residency.try_make_ready(digest)
        new = world.engine.step()
        events += new
        assert not [event for event in new if event.error is not None]
        if sum(event.finish is not None for event in events) == len(streams):
            for request in streams:
                assert ids_of(events, request) == expected["F07"]
            streams, events = [], []
            world.engine.check_integrity()
    for request in streams:
        world.engine.abort(request.request_id)
    world.check_idle()


@pytest.mark.parametrize("num_choices", [8])
def test_b049_unload_after_many_choices_ends_and_the_base_answers(
    cases: Cases, expected: dict[str | None, list[int]], num_choices: int
) -> None:
    world = cases.world(max_num_seqs=num_choices)
    for _ in range(3):
        choices = [world.ask("F01", PROMPT, 40, temperature=1.0, choice=i) for i in range(num_choices)]
        answers = world.run(choices)
        assert len({tuple(text_ids(events)) for events in answers.values()}) > 1
    drop(world, "F01")
    assert slot_of(world, "F01") is None
    assert world.answer(None, PROMPT, 40) == expected[None]
    world.check_idle()


def test_b050_unload_waits_for_its_requests_and_they_end_as_what_they_were(
    cases: Cases, expected: dict[str | None, list[int]]
) -> None:
    world = cases.world(max_loras=1, max_num_seqs=20)
    streams = [world.ask("F01", PROMPT, 40) for _ in range(20)]
    for request in streams:
        world.engine.add(request)
    events: list[TokenEvent] = []
    while any(len(request.output_ids) < 5 for request in streams):
        events += world.engine.step()
    drop(world, "F01")
    late, other = world.ask("F02", PROMPT, 40), world.ask("F01", PROMPT, 40)
    for request in (late, other):
        world.engine.add(request)
    for request in streams[::2]:
        world.engine.abort(request.request_id)
    assert slot_of(world, "F01") is SlotState.DRAINING
    while world.engine.has_requests:
        events += world.engine.step()
        world.engine.check_integrity()
    for request in (*streams[1::2], other):
        assert ids_of(events, request) == expected["F01"]
    assert ids_of(events, late) == expected["F02"]
    assert slot_of(world, "F01") is None
    world.check_idle()


def test_b053_vanished_files_end_their_own_request_and_heal(
    cases: Cases, expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    world = cases.world()
    digest = world.digest_of["F01"]
    assert digest is not None
    stored = world.loader.root / artifact_path(digest)
    stored.rename(tmp_path / "away")
    base, lost = world.ask(None, PROMPT, 40), world.ask("F01", PROMPT, 40)
    events = world.run([base, lost])
    error = events[lost.request_id][-1].error
    assert error is not None
    assert error.code == "adapter_loading"
    assert text_ids(events[base.request_id]) == expected[None]
    (tmp_path / "away").rename(stored)
    deadline = time.monotonic() + 60
    while world.engine.residency.find_failure(digest) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert world.answer("F01", PROMPT, 40) == expected["F01"]


def test_b055_a_resident_adapter_is_loaded_once(
    cases: Cases, expected: dict[str | None, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cases.world()
    assert world.answer("F01", PROMPT, 40) == expected["F01"]
    started: list[str] = []
    monkeypatch.setattr(world.loader, "start", started.append)
    for _ in range(5):
        assert world.answer("F01", PROMPT, 40) == expected["F01"]
    assert started == []


@pytest.mark.parametrize("num_slots", [2, 1])
def test_b061_more_adapters_than_slots_change_the_wait_alone(
    cases: Cases, expected: dict[str | None, list[int]], num_slots: int
) -> None:
    world = cases.world(max_loras=num_slots, max_cpu_loras=num_slots)
    for _ in range(20):
        requests = [world.ask(name, PROMPT, 6) for name in SIX]
        for name, request in zip(SIX, requests, strict=True):
            assert text_ids(world.run([request])[request.request_id]) == expected[name][:6]
    together = [world.ask(name, PROMPT, 6) for name in SIX]
    events = world.run(together)
    for name, request in zip(SIX, together, strict=True):
        assert text_ids(events[request.request_id]) == expected[name][:6]
    assert world.engine.residency.slots.num_evictions >= 20 * (6 - num_slots)
    world.check_idle()


def test_b062_one_slot_is_nobody_s_for_good(cases: Cases, expected: dict[str | None, list[int]]) -> None:
    world = cases.world(max_loras=1)
    for name in ("F01", "F02", "F01"):
        assert world.answer(name, PROMPT, 40) == expected[name]


def test_b062_a_kept_adapter_stays_and_the_base_and_others_go_on(
    cases: Cases, expected: dict[str | None, list[int]]
) -> None:
    world = cases.world(max_loras=2)
    kept = world.digest_of["F01"]
    assert kept is not None
    world.answer("F01", PROMPT, 1)
    world.engine.residency.keep(kept, is_kept=True)
    for name in ("F02", "F03", "F04", None):
        assert world.answer(name, PROMPT, 40) == expected[name]
        assert slot_of(world, "F01") is SlotState.READY


def test_b062_host_memory_for_fewer_than_the_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras"):
        check_config(EngineConfig(base="", cache_dir="", max_loras=4, max_cpu_loras=3))


def test_b063_an_adapter_is_the_same_each_time_it_comes_back(
    cases: Cases, expected: dict[str | None, list[int]]
) -> None:
    world = cases.world(max_loras=1, max_cpu_loras=4)
    logits = []
    for _ in range(5):
        for name in ("F01", "F02", "F03", "F04", "F01"):
            assert world.answer(name, PROMPT, 40) == expected[name]
        logits.append(world.logits(("F01", PROMPT))[0])
    assert all(bool((found == logits[0]).all()) for found in logits)


@pytest.mark.endure
def test_b066_a_soak_with_cancels_keeps_every_wait_bounded(cases: Cases, tmp_path: Path, long: Long) -> None:
    world = EngineWorld(
        cases.base, tmp_path / "cache", cpu_threads=1, max_loras=4, max_num_seqs=8, queue_timeout_s=30.0
    )
    digests = [world.put(write_adapter(tmp_path / f"a{i}", cases.base, rank=2 + i, seed=i)) for i in range(16)]
    alone = {d: text_ids(next(iter(world.run([world.request(PROMPT, d, 12)]).values()))) for d in [None, *digests]}
    rng = random.Random(8)
    open_requests: dict[str, Request] = {}
    ids: dict[str, list[int]] = {}
    num_done = 0
    ends_at = time.monotonic() + long(2, 1800)
    while time.monotonic() < ends_at or open_requests:
        while len(open_requests) < 24 and time.monotonic() < ends_at:
            request = world.request(PROMPT, rng.choice([None, *digests]), 12)
            world.engine.add(request)
            open_requests[request.request_id], ids[request.request_id] = request, []
            if rng.random() < 0.2:
                victim = rng.choice(list(open_requests))
                world.engine.abort(victim)
                del open_requests[victim], ids[victim]
        for event in world.engine.step():
            if event.request_id not in ids:
                continue
            ids[event.request_id] += event.token_ids
            if event.finish is not None:
                assert event.error is None, event
                assert ids.pop(event.request_id) == alone[open_requests.pop(event.request_id).digest]
                num_done += 1
    assert num_done > 50
    world.engine.check_integrity()
    assert world.engine.pool.num_free == world.engine.pool.num_blocks


def test_b042_one_bad_adapter_holds_up_no_other(cases: Cases, expected: dict[str | None, list[int]]) -> None:
    world = cases.world(max_loras=1)
    bad = "sha256:" + "0" * 64
    rotten = world.loader.root / artifact_path(bad)
    shutil.copytree(cases.folders["F02"], rotten)
    lost, good = world.request(PROMPT, bad, 4), world.ask("F01", PROMPT, 40)
    events = world.run([lost, good])
    assert events[lost.request_id][-1].error is not None
    assert text_ids(events[good.request_id]) == expected["F01"]
    world.check_idle()
