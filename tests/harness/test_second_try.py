"""`--second-try`, on folders of made-up tests in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
Run = Callable[..., tuple[int, str]]
GOOD = "def test_good(number=0): pass\n"
FLAKY = """
import pathlib
def test_flaky():
    assert pathlib.Path("second").exists() or pathlib.Path("second").touch(), "busy"
"""
BROKEN = "def test_broken(): assert 1 == 2\n"
CRASHING = FLAKY.replace("assert", "import os; assert").replace('"busy"', "os._exit(9)").replace("flaky", "crashing")
LEAVING = (
    FLAKY.replace("import pathlib", "import pathlib, pytest").replace(
        "def test_flaky():", "@pytest.fixture\ndef leaving():\n    yield"
    )
    + "def test_leaving(leaving): pass\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from second_try import pytest_addoption, pytest_configure\n")
    environ = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}

    def run(files: dict[str, str], *arguments: str, workers: int = 2) -> tuple[int, str]:
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--second-try", *arguments]
        # without what the run that this test is part of tells its own processes
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environ
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_once_passes_and_is_named(run: Run, workers: int) -> None:
    code, out = run({"good": GOOD, "flaky": FLAKY}, workers=workers)
    assert (code, out.count("AssertionError: busy")) == (0, 1)
    *_, named, closing = out.splitlines()
    assert named == "passed alone, failed beside others: test_flaky.py::test_flaky"
    assert "2 passed, 1 rerun in" in closing


def test_what_fails_twice_fails_the_run(run: Run) -> None:
    code, out = run({"good": GOOD, "flaky": FLAKY, "broken": BROKEN})
    assert code == 1
    assert out.count("assert 1 == 2") >= 2
    assert "2 failed, 1 passed in" in out.splitlines()[-1]
    assert "passed alone" not in out


@pytest.mark.parametrize(("name", "text"), [("crashing", CRASHING), ("leaving", LEAVING)])
def test_a_process_that_died_and_a_fixture_that_failed_count_too(run: Run, name: str, text: str) -> None:
    code, out = run({"good": GOOD, name: text})
    assert code == 0, out
    assert f"passed alone, failed beside others: test_{name}.py::test_{name}" in out
    assert "2 passed, 1 rerun in" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("files", "arguments", "code"),
    [
        ({}, (), 5),
        ({"good": GOOD}, (), 0),
        ({"many": "\n".join(f"def test_{i}(): assert False" for i in range(11))}, (), 1),
        ({"flaky": FLAKY, "good": GOOD}, ("-x", "-n", "0"), 1),
        ({"flaky": FLAKY, "good": GOOD}, ("--maxfail=1",), 2),
        ({"good": GOOD, "unreadable": "import nothing_there"}, (), 1),
    ],
    ids=["no tests", "all pass", "too many", "stops at the first", "stops a worker", "cannot be collected"],
)
def test_nothing_else_is_tried_again(run: Run, files: dict[str, str], arguments: tuple[str, ...], code: int) -> None:
    found, out = run(files, *arguments, workers=1)
    assert found == code, out
    assert "a second try" not in out
