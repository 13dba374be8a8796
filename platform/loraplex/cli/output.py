"""What the command line prints: data to standard output (tables, or JSON with `--json`), all else to standard error.

Text of servers, models and files is hostile: it is printed as plain text, without markup or control characters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from loraplex_registry.wire.adapter import Target

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON for programs.")]

SHORT_DIGEST = len("sha256:") + 12
"""Characters of a digest that tables show; the API takes as many."""
_PIPE_WIDTH, _MAX_WIDTH = 200, 100_000
_CONTROL = dict.fromkeys((*range(32), 127, *range(128, 160)), "�")
_CONTROL_BUT_LINES = {code: sign for code, sign in _CONTROL.items() if chr(code) not in "\n\t"}


@cache
def stdout() -> Console:
    """The console for data."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _find_pipe_width())


def _find_pipe_width() -> int:
    """Return COLUMNS, which shells set and do not export, so whoever did means it; else enough for most tables."""
    told = os.environ.get("COLUMNS", "")
    return int(told) if told.isascii() and told.isdigit() and 0 < int(told) <= _MAX_WIDTH else _PIPE_WIDTH


@cache
def stderr() -> Console:
    """The console for progress, hints and errors."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_WIDTH)


def clean(text: str) -> str:
    """Return text without control characters; lines and tabs stay."""
    return text.translate(_CONTROL_BUT_LINES)


def cell(value: Any) -> Text:
    """Return a value as a table shows it: one line of plain text."""
    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, list | tuple):
        return cell(", ".join(str(item) for item in value))
    return Text(str(value).translate(_CONTROL))


def when(time: str | None) -> str | None:
    """Return an RFC 3339 time to the minute, as tables show it."""
    return time and time[:16].replace("T", " ")


def show_targets(targets: Sequence[Target]) -> str:
    """Return versions with their shares, or the one version alone."""
    if len(targets) == 1:
        return str(targets[0].version)
    return ", ".join(f"{target.version} ({target.weight} %)" for target in targets)


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print one JSON document."""
    body = msgspec.json.encode(value)
    sys.stdout.write((body if one_line else msgspec.json.format(body, indent=2)).decode() + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """Print rows under a title, or `empty` (what to do to have some) on standard error if there are none."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, style="", header_style="dim", overflow="fold")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    if table.row_count:
        stdout().print(table)
    else:
        say(empty)


def print_facts(facts: dict[str, Any]) -> None:
    """Print one object, a fact a line."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        stdout().print(Text.assemble((name.ljust(width + 2), "dim"), cell(value)))


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a bar on standard error that goes when it is done; nothing where that is no terminal."""
    from rich.progress import Progress

    # one that is shown where nothing can be taken back leaves an empty line behind
    return Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_interactive)


def say(text: str) -> None:
    """Print a hint to standard error, as it stands."""
    stderr().print(Text(clean(text)))


def done(text: str) -> None:
    """Print that something was done to standard error."""
    stderr().print(Text.assemble(("✓ ", "green"), clean(text)))


def fail(message: str, *, code: str = "", param: str | None = None) -> None:
    """Print an error to standard error."""
    facts = ", ".join(part for part in (code, f"param {param}" if param else "") if part)
    stderr().print(Text.assemble(("error: ", "bold red"), clean(message), (f"  [{facts}]" if facts else "", "dim")))
