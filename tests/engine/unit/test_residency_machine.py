"""Any order of requests, loads, drops and ends keeps the caps of `Residency`, and ends with nothing held."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from examples import examples
from loraplex_engine.lora.residency import Residency
from loraplex_engine.slots.table import SlotTable
from schedules import Clock, ManualLoader, RecordingBank

DIGESTS = [f"d{index}" for index in range(10)]
digests = st.sampled_from(DIGESTS)


def build(num_slots: int, max_host: int) -> tuple[Residency, ManualLoader]:
    loader = ManualLoader()
    return Residency(SlotTable(num_slots), loader, RecordingBank(), max_host=max_host, clock=Clock()), loader


def load(residency: Residency, loader: ManualLoader, *names: str) -> None:
    for name in names:
        residency.prefetch(name)
        loader.finish(name)
        residency.poll()
        residency.check_integrity()


def test_what_is_waited_for_and_slots_leave_no_room_for_the_newest() -> None:
    residency, loader = build(num_slots=4, max_host=6)
    load(residency, loader, "a", "b", "c")
    assert [residency.try_make_ready(name) for name in ("a", "b", "c")] == [0, 1, 2]
    residency.want(["d", "e", "f", "g"])
    load(residency, loader, "d", "e", "f")
    assert residency.try_make_ready("d") == 3
    load(residency, loader, "gone")
    assert residency.host_digests == ("a", "b", "c", "e", "f", "d")


def test_the_newest_stays_where_nobody_waits() -> None:
    residency, loader = build(num_slots=2, max_host=2)
    load(residency, loader, "a", "b", "c")
    assert residency.host_digests == ("b", "c")
    assert [residency.try_make_ready(name) for name in ("b", "c")] == [0, 1]
    load(residency, loader, "d")
    assert residency.host_digests == ("b", "c", "d")


class ResidencyMachine(RuleBasedStateMachine):
    """Requests hold digests, some of them with a pin; the loader ends its jobs in any order."""

    @initialize(num_slots=st.integers(1, 4), spare=st.integers(0, 4))
    def begin(self, num_slots: int, spare: int) -> None:
        self.residency, self.loader = build(num_slots, num_slots + spare)
        self.held: list[str] = []
        self.pinned: list[tuple[str, int]] = []

    @rule(digest=digests)
    def hold(self, digest: str) -> None:
        self.residency.hold(digest)
        self.held.append(digest)

    @rule(line=st.lists(digests, max_size=8))
    def want(self, line: list[str]) -> None:
        self.residency.want(line)

    @rule(digest=digests)
    def prefetch(self, digest: str) -> None:
        self.residency.prefetch(digest)

    @precondition(lambda self: self.loader.started)
    @rule(index=st.integers(0, 99), is_good=st.booleans())
    def finish(self, index: int, is_good: bool) -> None:
        digest = self.loader.started[index % len(self.loader.started)]
        (self.loader.finish if is_good else self.loader.fail)(digest)
        self.residency.poll()

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 99), protected=st.sets(digests, max_size=2))
    def start(self, index: int, protected: set[str]) -> None:
        digest = self.held[index % len(self.held)]
        slot_id = self.residency.try_pin(digest, protected)
        if slot_id is not None:
            self.held.remove(digest)
            self.pinned.append((digest, slot_id))

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99))
    def end(self, index: int) -> None:
        digest, slot_id = self.pinned.pop(index % len(self.pinned))
        self.residency.unpin(slot_id)
        self.residency.let_go(digest)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        self.residency.let_go(self.held.pop(index % len(self.held)))

    @rule(digest=digests)
    def drop(self, digest: str) -> None:
        self.residency.drop(digest)

    @rule(digest=digests)
    def welcome(self, digest: str) -> None:
        self.residency.welcome(digest)

    @invariant()
    def keeps_its_caps(self) -> None:
        if hasattr(self, "residency"):
            self.residency.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        while self.pinned:
            self.end(0)
        while self.held:
            self.abort(0)
        while self.loader.started:
            self.finish(0, is_good=True)
        for digest in DIGESTS:
            self.residency.drop(digest)
        assert self.residency.host_digests == ()
        assert self.residency.tier_to_adapters["slot"] == 0


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)
