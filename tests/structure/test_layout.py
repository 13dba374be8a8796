"""How the source lies: no file that shadows `platform`, modules that say what they own, nothing grown too long."""

from __future__ import annotations

import ast
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "engine", "adapters_registry")
MODULES = sorted(path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 80
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_no_file_shadows_the_standard_module_platform() -> None:
    done = subprocess.run([ROOT / "scripts" / "check_layout.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bad", ["platform/__init__.py", "tests/gateway/__init__.py", "tests/platform/x.py"])
def test_layout_check_names_a_file_that_would_break_python(tmp_path: Path, bad: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    check = shutil.copy(ROOT / "scripts" / "check_layout.sh", tmp_path / "scripts")
    (tmp_path / bad).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / bad).touch()
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert bad.removesuffix("/x.py") in done.stderr


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    tree = _tree(path)
    assert ast.get_docstring(tree), "a module begins with a docstring: what it owns, what it does not know"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    long = [
        f"{node.name}: {(node.end_lineno or node.lineno) - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=_id)
def test_package_face_is_a_docstring_and_nothing_else(path: Path) -> None:
    assert len(_tree(path).body) == 1, "re-exports would make importers of one module import all of them"


def test_version_is_written_once() -> None:
    namespace: dict[str, str] = {}
    exec((ROOT / "platform/loraplex/version.py").read_text(encoding="utf-8"), namespace)
    version = namespace["__version__"]
    holders = [_id(path) for path in MODULES if f'"{version}"' in path.read_text(encoding="utf-8")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert holders == ["platform/loraplex/version.py"]
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == holders[0]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("[", "").replace("]", "")
