"""How wide tables are where no terminal says it."""

from __future__ import annotations

import pytest

from loraplex.cli.output import stdout


@pytest.mark.parametrize(("columns", "width"), [("72", 72), ("", 200), ("0", 200), ("wide", 200)])
def test_a_piped_table_is_as_wide_as_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stdout.cache_clear()
    try:
        assert stdout().width == width
    finally:
        stdout.cache_clear()
