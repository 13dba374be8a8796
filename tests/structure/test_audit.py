"""The audit of dependencies says by name that it was skipped, and fails where it was promised."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9/"


@pytest.mark.parametrize(("required", "code"), [("", 0), ("s3,audit", 1)])
def test_without_a_service_it_is_skipped_by_name_unless_it_was_promised(
    tmp_path: Path, required: str, code: int
) -> None:
    for name in ("scripts/audit.sh", "requirements/lock.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for place in (".venv/bin/python", "build/audit/bin/pip-audit"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(sys.executable)
    environ = {"PATH": os.environ["PATH"], "LORAPLEX_AUDIT_SERVICE": NOBODY, "LORAPLEX_TEST_REQUIRE": required}
    done = subprocess.run([tmp_path / "scripts/audit.sh"], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, f"skipped: audit: no vulnerability service answers ({NOBODY})\n")
