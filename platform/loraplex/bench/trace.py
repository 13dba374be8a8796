"""Traces: JSON lines of `timestamp`, `prompt_tokens`, `max_tokens`, and optionally `prompt` and `model`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loraplex.bench.errors import BenchError
from loraplex_registry.peft.unreadable import UNREADABLE


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace; `timestamp` in seconds from any beginning."""

    timestamp: float
    max_tokens: int
    prompt_tokens: int = 0
    prompt: str | None = None
    model: str | None = None


def read_trace(path: Path) -> list[TraceRow]:
    """Return a trace by time, its first request at 0.

    Raises:
        BenchError: The file cannot be read, or a line is no request.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"The trace cannot be read: {error}", param="trace") from error
    rows = [_read_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BenchError(f"The trace {path} is empty.", param="trace")
    rows.sort(key=lambda row: row.timestamp)
    return [msgspec.structs.replace(row, timestamp=row.timestamp - rows[0].timestamp) for row in rows]


def _read_row(path: Path, number: int, line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except UNREADABLE as error:
        raise BenchError(f"Line {number} of {path} is no request: {error}", param="trace") from error
    if row.max_tokens < 1 or (row.prompt is None and row.prompt_tokens < 1):
        raise BenchError(f"Line {number} of {path} needs max_tokens, and prompt_tokens or prompt.", param="trace")
    return row
