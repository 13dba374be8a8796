"""The table of `docs/chaos.md` has every fault of the code, in its order, and nothing else."""

from __future__ import annotations

from chaos_page import PAGE, Row, list_faults, read_listed, show


def test_page_lists_every_fault() -> None:
    names = [fault.name for fault in list_faults()]
    assert len(set(names)) == len(names) >= 25
    assert read_listed(PAGE.read_text()) == names


def test_page_says_what_each_fault_promises() -> None:
    page = PAGE.read_text()
    for fault in list_faults():
        assert f"| {fault.name} | {fault.holds} |" in page


def test_line_of_the_table() -> None:
    row = Row("Redis: gone", "as above", {"ok": 12, "cut": 1}, 0.31, 0.52, 1.04)
    assert show(row) == "| Redis: gone | as above | 12 ok, 1 cut | 0.3 s | 0.5 s | 1.0 s |"
