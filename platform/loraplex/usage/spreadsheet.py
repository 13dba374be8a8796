"""Rows as CSV for spreadsheets: hostile text in a cell is text there, and never a formula. Pure."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import msgspec

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(file: TextIO, rows: Sequence[dict[str, Any]], first: Sequence[str] = ()) -> None:
    """Write rows under their names, `first` in front; nothing but the names in `first` if there are no rows."""
    names = list(dict.fromkeys((*first, *(name for row in rows for name in row))))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(_cells(row, names) for row in rows)


def _cells(row: dict[str, Any], names: Iterable[str]) -> list[Any]:
    return [_cell(row.get(name)) for name in names]


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
