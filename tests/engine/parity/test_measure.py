"""The gate in a core: every kind of adapter is within its limits, broken ones are not, and nobody else notices."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines import INVOCATION, KINDS, SPECIAL_KINDS, EngineWorld, PeftJudge, SavedJudge
from loraplex_engine.bases.pull import pull
from loraplex_engine.loop import parity
from loraplex_engine.loop.parity import ParityCalls
from loraplex_engine.lora.packed import LoadFailed, PackedAdapter
from loraplex_engine.lora.worker import WorkerLaunch
from loraplex_engine.ops.lora.row import MODULE_ROW
from loraplex_engine.parity import worker
from loraplex_engine.parity.job import ParityFailed, ParityJob
from loraplex_engine.parity.process import ReferenceProcess
from loraplex_engine.wire.messages import MeasureParity, Reply
from loraplex_registry.peft.parity import ParityResult

ALL_KINDS = [*KINDS, *SPECIAL_KINDS]
WRONG_KINDS = ["r8_seven", "k_only", "dora", "head", "saved_head", "everything"]
TEXTS = [[3 + (7 * place + 11 * text) % 290 for place in range(24)] for text in range(3)]


class InlineProcess:
    """The reference at once and in this process; `ReferenceProcess` else."""

    def __init__(self, job: ParityJob, descriptor: int) -> None:
        self._outcome = worker._run(job, worker.os.dup(descriptor))

    def poll(self) -> Any:
        return self._outcome

    def close(self) -> None:
        pass


class Gate:
    """An engine with its measurements, driven as the core's loop does."""

    def __init__(self, world: EngineWorld, base: Path, dtype: str) -> None:
        self.world, self.ahead_s = world, 0.0
        spec = world.loader.spec
        launch = WorkerLaunch(str(world.loader.root.parent), spec, str(base), dtype, "", "", 1 << 30)
        self.calls = ParityCalls(world.engine, launch, 20.0, lambda: time.monotonic() + self.ahead_s)
        self._ids = iter(range(1, 1000))

    def begin(self, digest: str) -> int:
        call_id = next(self._ids)
        self.calls.add(MeasureParity(call_id, digest, TEXTS))
        return call_id

    def turn(self) -> list[Reply]:
        self.others = self.calls.take(self.world.engine.step())
        return self.calls.settle()

    def finish(self, count: int = 1) -> list[Reply]:
        replies: list[Reply] = []
        stop_at = time.monotonic() + 60
        while len(replies) < count:
            assert time.monotonic() < stop_at
            replies += self.turn()
            if self.calls.is_computing:
                time.sleep(0.01)
        assert not self.calls.is_pending
        self.world.engine.check_integrity()
        assert self.world.engine._sinks == {}
        return replies

    def measure(self, digest: str) -> ParityResult:
        self.begin(digest)
        (reply,) = self.finish()
        assert reply.error is None, reply.error
        return msgspec.convert(reply.body, ParityResult)


class Setting:
    """A tiny base, all kinds of adapters on it, and a gate in each dtype."""

    def __init__(self, source: Path, tmp: Path) -> None:
        self.base = pull(str(source), tmp / "bases")
        plain = PeftJudge(self.base, KINDS, tmp / "peft", std=0.15).folders
        self.folders = {**plain, **SavedJudge(self.base, SPECIAL_KINDS, tmp / "saved", std=0.15).folders}
        self.gates: dict[str, Gate] = {}
        for dtype in ("float32", "bfloat16"):
            world = EngineWorld(self.base, tmp / dtype, dtype=dtype, max_loras=2, max_cpu_loras=2)
            self.gates[dtype] = Gate(world, self.base, dtype)

    def put(self, dtype: str, name: str) -> str:
        return self.gates[dtype].world.put(self.folders[name])


@pytest.fixture(scope="module")
def setting(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tiny_qwen2, tmp_path_factory.mktemp("gate"))


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "ReferenceProcess", InlineProcess)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All kinds in the dtype that is held to more, some of them in the other one: all in `make endure`."""
    if {"kind", "dtype"} <= set(metafunc.fixturenames):
        kinds = WRONG_KINDS if "wrong" in metafunc.function.__name__ else ALL_KINDS
        some = kinds if metafunc.config.getoption("--endure") else kinds[::3]
        metafunc.parametrize(
            ("dtype", "kind"), [*(("float32", kind) for kind in kinds), *(("bfloat16", kind) for kind in some)]
        )


@pytest.mark.endure
def test_a_good_adapter_of_every_kind_is_within_its_limits(setting: Setting, dtype: str, kind: str) -> None:
    result = setting.gates[dtype].measure(setting.put(dtype, kind))
    assert result.is_within, result
    assert (result.dtype, result.num_prompts, result.is_finite) == (dtype, 3, True)
    assert result.effect_rms > 0.1
    if dtype == "float32":
        assert result.max_logit_difference < 1e-4


def _scale(factor: float) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        table["scaling"] *= factor

    return change


def _swap_layers(table: Any) -> None:
    """Give the matrices of each module to the same module of the next layer."""
    for place in {tuple(place[1:]) for place in table["place"].tolist()}:
        same = [row for row, other in enumerate(table["place"].tolist()) if tuple(other[1:]) == place]
        table["entry"][same] = np.roll(table["entry"][same], 1, axis=0)


def _drop_one(table: Any) -> None:
    table["scaling"][len(table) // 2] = 0


FAULTS: dict[str, Callable[[Any], None]] = {
    "alpha over r once more": _scale(2.0),
    "half of the scale": _scale(0.5),
    "no adapter": _scale(0.0),
    "layers swapped": _swap_layers,
    "one module dropped": _drop_one,
}


@pytest.fixture
def break_tables(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Let both engines pack by a fault from now on; what was loaded so is forgotten at the end."""

    def start(change: Callable[[Any], None]) -> None:
        for gate in setting.gates.values():
            _forget_all(gate)
            take = gate.world.loader.take_finished
            monkeypatch.setattr(
                gate.world.loader, "take_finished", lambda take=take: [_break(one, change) for one in take()]
            )

    yield start
    for gate in setting.gates.values():
        _forget_all(gate)


def _forget_all(gate: Gate) -> None:
    for digest in gate.world.engine.residency.host_digests:
        gate.world.engine.residency.drop(digest)
        gate.world.engine.residency.welcome(digest)


def _break(result: PackedAdapter | LoadFailed, change: Callable[[Any], None]) -> PackedAdapter | LoadFailed:
    if isinstance(result, LoadFailed):
        return result
    table = np.frombuffer(result.facts.table, MODULE_ROW).copy()
    change(table)
    return PackedAdapter(msgspec.structs.replace(result.facts, table=table.tobytes()), result.buffer)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_in_packing_is_beyond_the_limits(
    setting: Setting, break_tables: Callable[[Any], None], dtype: str, fault: str
) -> None:
    digest = setting.put(dtype, "r8_seven")
    break_tables(FAULTS[fault])
    result = setting.gates[dtype].measure(digest)
    assert not result.is_within, result


@pytest.mark.endure
def test_wrong_bytes_in_the_slot_are_beyond_the_limits(setting: Setting, dtype: str, kind: str) -> None:
    gate, digest = setting.gates[dtype], setting.put(dtype, kind)
    assert gate.measure(digest).is_within
    assert gate.world.engine.residency.spoil(digest)
    assert not gate.measure(digest).is_within
    _forget_all(gate)
    assert gate.measure(digest).is_within, "loaded anew it is right again"


def test_streams_beside_a_measurement_keep_their_bits(setting: Setting) -> None:
    gate = setting.gates["float32"]
    world = gate.world
    prompts = [[5, 6, 7, *INVOCATION, 9], [8, 9, 10, 11]]
    digest, measured = setting.put("float32", "r4"), setting.put("float32", "dora")

    def run(*, has_measurement: bool) -> list[list[int]]:
        requests = [world.request(prompts[0], digest), world.request(prompts[1])]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            world.engine.add(request)
        if has_measurement:
            gate.begin(measured)
        while world.engine.has_requests or gate.calls.is_pending:
            replies = gate.turn()
            assert all(reply.error is None for reply in replies)
            for event in gate.others:
                tokens[event.request_id] += event.token_ids
        return list(tokens.values())

    alone = run(has_measurement=False)
    assert run(has_measurement=True) == alone
    assert [len(ids) for ids in alone] == [32, 32]


def test_calls_wait_for_each_other_and_too_many_are_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_MAX_CALLS", 3)
    gate, digest = setting.gates["float32"], setting.put("float32", "r4")
    for _ in range(4):
        gate.begin(digest)
    replies = gate.finish(4)
    assert [reply.error.code for reply in replies if reply.error] == ["queue_full"]
    assert sum(reply.error is None for reply in replies) == 3


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_a_cancelled_call_holds_nothing_any_more(setting: Setting, turns: int) -> None:
    gate, digest = setting.gates["float32"], setting.put("float32", "r8_seven")
    first, second = gate.begin(digest), gate.begin(digest)
    for _ in range(turns):
        assert gate.turn() == []
    gate.calls.cancel(second)
    gate.calls.cancel(first)
    assert gate.turn() == []
    assert not gate.calls.is_pending
    assert not gate.world.engine.has_requests
    gate.world.engine.check_integrity()
    assert gate.measure(digest).is_within


def test_an_adapter_that_does_not_load_gives_its_error(setting: Setting) -> None:
    gate = setting.gates["float32"]
    gate.begin("sha256:" + "0" * 64)
    (reply,) = gate.finish()
    assert reply.error is not None
    assert reply.error.code == "adapter_loading"
    assert gate.world.engine.residency.health.num_failed == 1
    gate.world.engine.residency.health.forgive("sha256:" + "0" * 64)


def test_time_is_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(InlineProcess):
        def poll(self) -> Any:
            return None

    monkeypatch.setattr(parity, "ReferenceProcess", Hanging)
    gate = setting.gates["float32"]
    gate.begin(setting.put("float32", "r4"))
    while not gate.calls.is_computing:
        assert gate.turn() == []
    gate.ahead_s += parity.PARITY_TIMEOUT_S
    (reply,) = gate.finish()
    assert reply.error is not None
    assert reply.error.code == "deadline_exceeded"


def test_a_reference_that_fails_is_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(InlineProcess):
        def poll(self) -> Any:
            return ParityFailed("The reference could not be computed: no room.")

    monkeypatch.setattr(parity, "ReferenceProcess", Failing)
    gate = setting.gates["float32"]
    gate.begin(setting.put("float32", "r4"))
    (reply,) = gate.finish()
    assert reply.error is not None
    assert (reply.error.code, "no room" in reply.error.message) == ("internal_error", True)


def test_the_reference_is_computed_in_a_process_that_can_be_killed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "ReferenceProcess", ReferenceProcess)
    gate, digest = setting.gates["bfloat16"], setting.put("bfloat16", "alora")
    assert gate.measure(digest).is_within
    call_id = gate.begin(digest)
    while not gate.calls.is_computing:
        assert gate.turn() == []
    current = gate.calls._current
    assert current is not None
    assert current.process is not None
    gate.calls.cancel(call_id)
    assert current.process._process.wait(10) == -signal.SIGKILL
    assert not gate.calls.is_pending


def test_a_process_that_dies_ends_its_measurement(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "ReferenceProcess", ReferenceProcess)
    gate = setting.gates["float32"]
    gate.begin(setting.put("float32", "r4"))
    while not gate.calls.is_computing:
        assert gate.turn() == []
    current = gate.calls._current
    assert current is not None
    assert current.process is not None
    current.process._process.kill()
    (reply,) = gate.finish()
    assert reply.error is not None
    assert (reply.error.code, "died" in reply.error.message) == ("internal_error", True)
