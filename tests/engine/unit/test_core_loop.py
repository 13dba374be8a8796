"""What the core's loop does beside its steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq

from engines import EngineWorld
from loraplex_engine.bases.pull import pull
from loraplex_engine.loop.core import CoreLoop
from loraplex_engine.lora.packed import LoadFailed, PackedAdapter
from loraplex_engine.wire import messages as wire
from support import write_adapter


class Inbox:
    """A socket whose messages are there at once; remembers how long it was waited for."""

    def __init__(self, *messages: wire.ToCore) -> None:
        self.messages = [wire.encode(message) for message in messages]
        self.polls: list[int] = []

    def poll(self, timeout_ms: int) -> bool:
        self.polls.append(timeout_ms)
        return bool(self.messages)

    def recv(self) -> bytes:
        return self.messages.pop(0)


def add(request_id: str) -> wire.AddRequest:
    return wire.AddRequest(request_id, [3, 4, 5], wire.SamplingParams(50, ignore_eos=True))


@pytest.fixture
def base(tiny_llama: Path, tmp_path: Path) -> Path:
    return pull(str(tiny_llama), tmp_path / "bases")


@pytest.fixture
def world(base: Path, tmp_path: Path) -> EngineWorld:
    return EngineWorld(base, tmp_path, cpu_threads=1)


def test_an_idle_core_gathers_the_requests_that_come_together(world: EngineWorld) -> None:
    inbox = Inbox(add("a"), add("b"))
    loop = CoreLoop(world.engine, inbox, lambda _: None, 1.0)  # type: ignore[arg-type]
    loop.turn()
    assert inbox.polls == [200, 0, 2, 2]
    assert {request.request_id for request in world.engine.scheduler.running} == {"a", "b"}
    inbox.polls.clear()
    inbox.messages.append(wire.encode(add("c")))
    loop.turn()
    assert inbox.polls == [0, 0, 0], "a core that computes does not wait"


def test_the_loop_beats_once_a_second(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 100.0, []
    monkeypatch.setattr("loraplex_engine.loop.core.time.monotonic", lambda: now)
    loop = CoreLoop(world.engine, Inbox(), said.append, 1.0)  # type: ignore[arg-type]
    for _ in range(25):
        loop.turn()
        now += 0.1
    assert said == [wire.Beat()] * 3


def test_the_first_step_with_adapters_asks_for_patience(world: EngineWorld, base: Path, tmp_path: Path) -> None:
    said: list[wire.ToFront] = []
    CoreLoop(world.engine, Inbox(), said.append, 1.0)  # type: ignore[arg-type]
    digest = world.put(write_adapter(tmp_path / "adapter", base))
    for digest_or_base in (None, digest, None, digest):
        world.run([world.request([3, 4, 5], digest_or_base, max_tokens=2)])
    assert said == [wire.Beat(patience_s=600)]


def test_state_tells_where_the_memory_went_and_of_a_drain(world: EngineWorld) -> None:
    said: list[wire.ToFront] = []
    loop = CoreLoop(world.engine, Inbox(wire.GetState(1), wire.Drain(2), wire.GetState(3)), said.append, 1.0)  # type: ignore[arg-type]
    loop.turn()
    before, after, drained = (message for message in said if isinstance(message, wire.Reply))
    assert isinstance(before.body, dict)
    assert isinstance(after.body, dict)
    kv = before.body["kv"]
    assert before.body["memory"]["kv_tokens"] == kv["num_blocks"] * kv["block_size"]
    assert before.body["memory"]["process_bytes"] > before.body["memory"]["weight_bytes"] > 0
    assert (before.body["is_draining"], after.body["is_draining"]) == (False, True)
    assert before.body["advice"] == []
    assert (drained.call_id, drained.body) == (2, {"drained": True})


def test_host_seconds_are_the_part_of_a_step_beside_the_model(world: EngineWorld) -> None:
    world.run([world.request([3, 4, 5], max_tokens=4)])
    families = world.engine.metrics.registry.collect()
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["loraplex_step_host_seconds_count"] == samples["loraplex_step_seconds_count"] == 4
    assert 0 < samples["loraplex_step_host_seconds_sum"] < samples["loraplex_step_seconds_sum"]


class StuckLoader:
    """A loader that never gets done."""

    def start(self, digest: str) -> None: ...

    def take_finished(self) -> list[PackedAdapter | LoadFailed]:
        return []


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    rests: list[float] = []
    monkeypatch.setattr("loraplex_engine.loop.core.time.sleep", rests.append)
    return rests


def test_steps_rest_while_a_load_gets_nowhere_and_only_then(
    world: EngineWorld, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine
    now = time.monotonic()
    monkeypatch.setattr(engine.residency, "_clock", lambda: now)
    monkeypatch.setattr(engine.residency, "_loader", StuckLoader())
    context = zmq.Context()
    loop = CoreLoop(engine, context.socket(zmq.PULL), lambda _: None, 1.0)
    engine.add(world.request([3, 4, 5], max_tokens=100))
    loop.turn()
    assert rests == []
    engine.residency.prefetch("sha256:" + "0" * 64)
    loop.turn()
    assert rests == []
    now += 0.5
    step_s = -time.monotonic()
    loop.turn()
    step_s += time.monotonic()
    (rest_s,) = rests
    assert 0 < rest_s <= 0.12 * step_s
    engine.abort(next(iter(engine.scheduler.running)).request_id)
    loop.turn()
    assert len(rests) == 1
    context.destroy()


def test_priority_salt_and_weight_of_a_message_reach_the_scheduler(world: EngineWorld) -> None:
    params = wire.SamplingParams(4, ignore_eos=True)
    inbox = Inbox(wire.AddRequest("r", [3, 4, 5], params, priority=3, cache_salt="s", weight=7))
    CoreLoop(world.engine, inbox, lambda _: None, 1.0).turn()  # type: ignore[arg-type]
    assert [(r.priority, r.cache_salt, r.weight) for r in world.engine.scheduler.running] == [(3, "s", 7)]
    (standing,) = world.engine.state()["tenants"]
    assert (standing["weight"], standing["running"], standing["waiting"]) == (7, 1, 0)
    assert world.engine.state()["max_running"] == 16
