"""CSV on standard output, for spreadsheets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from loraplex.usage.spreadsheet import write_csv

AsCsv = Annotated[bool, Parameter(name="--csv", negative=(), help="Print all columns as CSV.")]


def print_csv(rows: Sequence[dict[str, Any]], first: Sequence[str] = ()) -> None:
    """Print rows under their names, `first` in front; nothing but the names in `first` if there are no rows."""
    write_csv(sys.stdout, rows, first)
    sys.stdout.flush()
