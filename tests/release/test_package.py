"""What a release is made of, without installing it: `make release-check` does the whole of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
PINNED = re.compile(r"^([a-z0-9.-]+)(?:\[[a-z,]+\])?==(\S+?)(?: ; (.+?))? \\$", re.MULTILINE)
LOCKS = ("build", "control-plane", "engine", "release")
COMPILE = (
    "import pathlib, sys\nfor name in sys.stdin.read().split(): compile(pathlib.Path(name).read_bytes(), name, 'exec')"
)


def read_project() -> dict[str, object]:
    """The table [project] of pyproject.toml."""
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def read_lock(name: str) -> dict[str, set[str]]:
    """The versions that a lock allows each package; of several, markers choose."""
    pins: dict[str, set[str]] = {}
    for package, version, _ in PINNED.findall((ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")):
        pins.setdefault(package, set()).add(version)
    return pins


def test_pythons_of_the_package_are_those_that_the_release_check_tries() -> None:
    project = read_project()
    classifiers = project["classifiers"]
    assert isinstance(classifiers, list)
    assert [text.rpartition(" ")[2] for text in classifiers if re.search(r"Python :: 3\.\d+$", text)] == list(PYTHONS)
    allowed = SpecifierSet(str(project["requires-python"]))
    assert all(f"{minor}.0" in allowed for minor in PYTHONS)
    assert "3.10.9" not in allowed
    assert f"PYTHONS = {PYTHONS}".replace("'", '"') in (ROOT / "scripts/release_check.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("minor", PYTHONS)
def test_control_plane_is_written_in_the_language_of(minor: str, find_python: dict[str, str]) -> None:
    python = find_python.get(minor)
    if python is None:
        pytest.skip(f"Python {minor} is not on this machine")
    roots = ("platform/loraplex", "adapters_registry/loraplex_registry", "engine/loraplex_engine/wire", "migrations")
    files = [str(file) for root in roots for file in (ROOT / root).rglob("*.py")]
    words = [python, "-W", "error", "-c", COMPILE]
    done = subprocess.run(words, input="\n".join(files), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def find_python() -> dict[str, str]:
    """Interpreters of this machine by minor version; those of pyenv count though they are not on the path."""
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for minor in PYTHONS:
        for candidate in (shutil.which(f"python{minor}"), *map(str, sorted(homes.glob(f"{minor}.*/bin/python")))):
            if candidate and _minor_of(candidate) == minor:
                found.setdefault(minor, candidate)
    return found


def _minor_of(python: str) -> str:
    words = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_of_a_lock_has_hashes(name: str) -> None:
    text = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    assert len(entries) > 3
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert "://" not in text, "a lock names no index"


@pytest.mark.parametrize("name", LOCKS)
def test_locks_hold_the_versions_that_the_tests_pass_with(name: str) -> None:
    lines = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
    lines += (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8").splitlines()
    tested = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    pins = read_lock(name)
    other = {package: versions for package, versions in pins.items() if {tested.get(package)} - {None} - versions}
    assert other == {}, "make lock"


@pytest.mark.parametrize(("name", "extra"), [("control-plane", ""), ("engine", "engine")])
def test_locks_hold_all_that_pyproject_asks_for(name: str, extra: str) -> None:
    project = read_project()
    extras = project["optional-dependencies"]
    wanted = project["dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(wanted, list)
    pins = read_lock(name)
    for text in [*wanted, *(extras[extra] if extra else [])]:
        requirement = Requirement(text)
        versions = pins.get(canonicalize_name(requirement.name), set())
        assert any(version in requirement.specifier for version in versions), f"{text}: make lock"


def test_the_lock_of_the_control_plane_is_closed_and_has_no_torch() -> None:
    pins = read_lock("control-plane")
    for package in pins:
        try:
            requirements = [Requirement(text) for text in metadata.requires(package) or ()]
        except metadata.PackageNotFoundError:
            continue  # of another platform
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in pins, f"{package} needs {requirement.name}: make lock"
    assert not {"torch", "transformers", "tokenizers", "pyzmq", "triton"} & set(pins)
