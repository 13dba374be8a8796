from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from loraplex_engine.slots.table import SlotState, SlotTable


def _ready(table: SlotTable, digest: str) -> int:
    slot_id = table.try_assign(digest)
    assert slot_id is not None
    table.mark_ready(slot_id)
    return slot_id


def test_assign_evicts_the_least_recently_used_adapter_without_pins() -> None:
    table = SlotTable(3)
    for digest in "abc":
        _ready(table, digest)
    table.pin(0)
    table.pin(1)
    table.unpin(1)
    assert table.try_assign("d") == 2
    assert [slot.digest for slot in table.slots] == ["a", "b", "d"]
    assert table.num_evictions == 1


def test_assign_is_a_shortage_when_every_slot_is_needed() -> None:
    table = SlotTable(2)
    table.pin(_ready(table, "a"))
    table.slots[_ready(table, "b")].keep = True
    assert table.try_assign("c") is None


def test_assign_takes_no_slot_of_a_protected_digest() -> None:
    table = SlotTable(2)
    for digest in "ab":
        _ready(table, digest)
    assert table.try_assign("c", protected={"a", "b"}) is None
    assert table.try_assign("c", protected={"a"}) == 1


def test_draining_slot_answers_its_own_requests_and_empties_only_by_release() -> None:
    table = SlotTable(1)
    slot_id = _ready(table, "a")
    table.pin(slot_id)
    table.drain(slot_id)
    assert table.is_ready("a")
    table.pin(slot_id)
    for _ in range(2):
        assert table.try_assign("b") is None
        table.unpin(slot_id)
    assert table.try_assign("b") is None
    table.release(slot_id)
    assert table.try_assign("b") == slot_id


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(3)

    def _slots(self, *states: SlotState) -> list[int]:
        return [i for i, slot in enumerate(self.table.slots) if slot.state in states]

    @rule(digest=st.sampled_from("abcdef"))
    def assign(self, digest: str) -> None:
        if self.table.find(digest) is None:
            usable = self._slots(SlotState.EMPTY) + [
                i
                for i in self._slots(SlotState.READY)
                if not self.table.slots[i].num_pins and not self.table.slots[i].keep
            ]
            assert (self.table.try_assign(digest) is None) == (not usable)

    @precondition(lambda self: self._slots(SlotState.LOADING))
    @rule(data=st.data(), succeeds=st.booleans())
    def load(self, data: st.DataObject, succeeds: bool) -> None:
        slot_id = data.draw(st.sampled_from(self._slots(SlotState.LOADING)))
        if succeeds:
            self.table.mark_ready(slot_id)
        else:
            self.table.release(slot_id)

    @precondition(lambda self: self._slots(SlotState.READY))
    @rule(data=st.data(), act=st.sampled_from(["pin", "keep", "drain", "revive"]))
    def use(self, data: st.DataObject, act: str) -> None:
        slot_id = data.draw(st.sampled_from(self._slots(SlotState.READY)))
        if act == "pin":
            self.table.pin(slot_id)
        elif act == "keep":
            self.table.slots[slot_id].keep = not self.table.slots[slot_id].keep
        elif act == "revive":
            self.table.drain(slot_id)
            self.table.revive(slot_id)
        else:
            self.table.drain(slot_id)

    @precondition(lambda self: any(slot.num_pins for slot in self.table.slots))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.table.unpin(data.draw(st.sampled_from([i for i, slot in enumerate(self.table.slots) if slot.num_pins])))

    @rule()
    def release(self) -> None:
        for slot_id in self._slots(SlotState.DRAINING):
            if not self.table.slots[slot_id].num_pins:
                self.table.release(slot_id)

    @invariant()
    def fits_together(self) -> None:
        self.table.check_integrity()


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)
