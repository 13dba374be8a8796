"""The table of `docs/chaos.md`: which faults there are, and what came of each in the last run of `make chaos`.

A run notes its rows in a file; `python tests/chaos_page.py FILE` writes them into the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from chaos_client_faults import CLIENTS
from chaos_fault import Fault
from chaos_faults import CLOCK, DATABASES, PROCESSES, STORE
from chaos_machine import MACHINE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "chaos.md"
BEGIN, END = "<!-- written by make chaos -->\n", "<!-- end -->"
HEAD = (
    "| fault | what holds meanwhile | requests beside it | slowest | answers again | as before |\n"
    "|---|---|---|---|---|---|\n"
)


class Row(msgspec.Struct, frozen=True):
    """What came of a fault: how requests beside it ended, and the seconds from its end until all was well."""

    fault: str
    holds: str
    ends: dict[str, int]
    longest_s: float
    answering_s: float
    whole_s: float


def list_fleet_faults() -> list[Fault]:
    """Those of a fleet."""
    return [*PROCESSES, *DATABASES, *STORE, *CLOCK, *CLIENTS]


def list_faults() -> list[Fault]:
    """All, in the order of the table."""
    return [*list_fleet_faults(), *MACHINE]


def note(row: Row, path: str | None) -> None:
    """Print a row, and keep it for the table where the run has a file for that."""
    print(show(row))
    if path:
        with Path(path).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def show(row: Row) -> str:
    """A line of the table."""
    ends = ", ".join(f"{count} {end}" for end, count in row.ends.items())
    seconds = " | ".join(f"{value:.1f} s" for value in (row.longest_s, row.answering_s, row.whole_s))
    return f"| {row.fault} | {row.holds} | {ends} | {seconds} |"


def read_listed(page: str) -> list[str]:
    """The faults that a page's table has, in its order."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return re.findall(r"^\| (.+?) \|", table.removeprefix(HEAD), re.MULTILINE)


def write(rows: list[Row]) -> None:
    """Write the table of a run into the page; what it left out for want of a tool says so."""
    lines = {row.fault: show(row) for row in rows}
    table = "".join(
        lines.get(fault.name, f"| {fault.name} | {fault.holds} | not run | | | |") + "\n" for fault in list_faults()
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{table}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write([msgspec.json.decode(line, type=Row) for line in Path(sys.argv[1]).read_bytes().splitlines()])
