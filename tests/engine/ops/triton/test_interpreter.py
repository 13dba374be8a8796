"""Runs the tests in `interpreted`, where the kernels execute in Python, in a process of their own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).resolve().parents[4]


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    versions = [tuple(map(int, importlib.metadata.version(name).split(".")[:2])) for name in ("triton", "numpy")]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        return "the interpreter of Triton 3.6 needs a NumPy older than 2.4"
    return None


@pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
@pytest.mark.endure
def test_kernels_agree_with_their_definition_in_the_interpreter(long):
    # the interpreter of Triton 3.6 takes arrays of one number for numbers
    ignored = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", ignored, str(INTERPRETED)]
    command += long([], ["--endure"])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= long(70, 460)


def test_nothing_imports_triton_on_the_cpu(run_python):
    program = (
        "import sys, torch, loraplex_engine.models.decoder, loraplex_engine.runner\n"
        "from loraplex_engine.ops.dispatch import select_kernels\n"
        "select_kernels('cpu', torch.float64)\n"
        "print('triton' in sys.modules)"
    )
    assert run_python(program).strip() == "False"
