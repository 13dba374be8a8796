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
from loraplex_engine.wire.messages import AddRequest, SamplingParams, encode


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
    tiny_llama: Path, tmp_path: Path, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = EngineWorld(pull(str(tiny_llama), tmp_path / "bases"), tmp_path, cpu_threads=1)
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


def test_priority_of_a_message_reaches_the_scheduler(tiny_llama: Path, tmp_path: Path) -> None:
    world = EngineWorld(pull(str(tiny_llama), tmp_path / "bases"), tmp_path, cpu_threads=1)
    context = zmq.Context()
    address = f"ipc://{tmp_path}/in"
    inbox, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(address)
    sender.connect(address)
    loop = CoreLoop(world.engine, inbox, lambda _: None, 1.0)
    sender.send(encode(AddRequest("r", [3, 4, 5], SamplingParams(4, ignore_eos=True), priority=3)))
    loop.turn()
    assert [request.priority for request in world.engine.scheduler.running] == [3]
    context.destroy(linger=0)
