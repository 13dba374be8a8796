"""A wheel that was installed without the engine's packages: each command that needs them says so in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_installed import needs_engine

pytestmark = needs_engine

HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "{package}" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def run_without(package: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where `package` cannot be found, nor by any program that it starts."""
    (folder / "sitecustomize.py").write_text(HIDING.format(package=package))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        "LORAPLEX_DATA_DIR": str(folder / "data"),
        "LORAPLEX_CACHE_DIR": str(folder / "cache"),
    }
    argv = (sys.executable, "-m", "loraplex", *arguments)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--port", "0"),
        ("up", "--demo", "--once"),
        ("engine", "--base", "smollm2-135m"),
        ("base", "pull", "smollm2-135m"),
    ],
    ids=" ".join,
)
def test_one_sentence_says_to_install_the_engine(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_without("tokenizers", tmp_path, *arguments)
    said = "error: This Python has no tokenizers, which the engine needs. Install the engine: pip install"
    assert (done.returncode, done.stdout) == (1, "")
    assert " ".join(done.stderr.split()) == f"{said} 'loraplex[engine]'."
    assert not (tmp_path / "data").exists()


def test_serving_needs_more_than_fetching(tmp_path: Path) -> None:
    assert "has no torch" in run_without("torch", tmp_path, "engine", "--base", "smollm2-135m").stderr
    fetched = run_without("torch", tmp_path, "base", "pull", str(tmp_path / "none"))
    assert fetched.returncode == 1
    assert "torch" not in fetched.stderr
