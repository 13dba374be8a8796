"""The pages in docs/reference/ are what the code says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_pages_are_current() -> None:
    # in a process of its own: how usages begin depends on how the program was called
    argv = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("cli.md", "## loraplex bench\n"),
        ("cli.md", "`--concurrency INT`"),
        ("settings.md", "| `LORAPLEX_KEY_PEPPER` |"),
        ("metrics.md", "| `loraplex_step_adapters` | 0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64 |"),
        ("metrics.md", "| `loraplex_adapter_slots` | gauge | `state` |"),
        ("errors.md", "| [`adapter_rejected`](../errors.md#adapter_rejected) | 422 | invalid_request_error |"),
        ("api.md", "| `GET /api/v1/stats` |"),
    ],
)
def test_page_tells_what_the_code_has(page: str, told: str) -> None:
    assert told in (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
