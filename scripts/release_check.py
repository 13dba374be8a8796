"""`make release-check`: what has to hold before a version is tagged, from a clean tree to a demo run from the wheel.

Everything is made from the committed files, in a folder outside the checkout. With arguments, of `wheel`, `sdist` and
the versions of Python, only these are installed and tried.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

from release_steps import (
    ROOT,
    TOOLS,
    StepError,
    build_outside_environment,
    list_lines,
    read_version,
    require,
    run,
    step,
)

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions that the control plane runs on; pyproject.toml has the same."""
PACKAGES = {
    "platform/loraplex": "loraplex",
    "engine/loraplex_engine": "loraplex_engine",
    "adapters_registry/loraplex_registry": "loraplex_registry",
    "migrations": "loraplex/_migrations",
    "examples/adapters": "loraplex/_examples/adapters",
}
"""Folders of the source, and where a wheel has them."""
KINDS = ("_migrations/versions/", "ops/native/ops.cpp", "dashboard/static/", "dashboard/templates/", ".lua")
"""Files that are not Python and without which parts fail only when they run."""
IN_SDIST = (
    *("adapters_registry", "docs", "engine", "examples", "helm", "images"),
    *("migrations", "platform", "requirements", "scripts", "tests"),
)
TESTS = ("tests/gateway/unit", "tests/registry/unit", "tests/gateway/api", "tests/registry/api", "tests/migrations")
"""Tests of the control plane, which need no engine."""
NEED_MODELS = (
    "tests/gateway/unit/cli/test_adapter_check.py",
    *(
        f"tests/registry/unit/peft/test_{name}.py"
        for name in ("config", "fuzz", "header", "kinds", "peft_saved", "releases", "target")
    ),
)
"""Of these, what compares with PyTorch, PEFT or safetensors."""
TEST_TOOLS = ("hypothesis", "openai", "pytest", "pytest-asyncio", "pytest-socket", "pytest-xdist", "tokenizers")
IMPORT_ALL = """
import importlib, pathlib, sys
import loraplex, loraplex_registry
for package in (loraplex, loraplex_registry):
    folder = pathlib.Path(package.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        if not {"__main__", "_migrations", "_examples"} & set(parts):
            importlib.import_module(".".join(part for part in parts if part != "__init__"))
heavy = {"torch", "transformers", "tokenizers", "zmq", "safetensors"} & set(sys.modules)
assert not heavy, heavy
print(sum(name.startswith("loraplex") for name in sys.modules), "modules")
"""


def main(chosen: Sequence[str]) -> None:
    """Run all steps in order, and of the installations those that were chosen."""
    known = ("wheel", "sdist", *PYTHONS)
    if not set(chosen) <= set(known):
        sys.exit(f"there are {', '.join(known)}")
    version = read_version()
    with tempfile.TemporaryDirectory(prefix="loraplex-release-") as name:
        work = Path(name)
        check_source(version)
        wheel, sdist = build(work, version)
        check_contents(wheel, sdist)
        with step("metadata: twine check --strict"):
            run(TOOLS / "twine", "check", "--strict", wheel, sdist)
        if "wheel" in chosen:
            try_all(work / "wheel", wheel, version)
        if "sdist" in chosen:
            try_sdist(work / "sdist", sdist, version)
        for minor in [minor for minor in PYTHONS if minor in chosen]:
            try_python(work / f"python{minor}", minor, wheel)
        kept = ROOT / "dist"
        kept.mkdir(exist_ok=True)
        for file in (wheel, sdist):
            shutil.copy(file, kept)
    print(f"dist/{wheel.name}\ndist/{sdist.name}")


def check_source(version: str) -> None:
    """The tree is what was committed, and says one version."""
    with step("the tree is clean"):
        changed = run("git", "status", "--porcelain").splitlines()
        require(not changed, f"not committed:\n{list_lines(changed)}")
    with step(f"version {version}: changelog, chart, compose.yaml, tag") as facts:
        first = next(line for line in read("CHANGELOG.md").splitlines() if line.startswith("## "))
        heading = re.fullmatch(rf"## \[?{re.escape(version)}\]? - (unreleased|\d{{4}}-\d{{2}}-\d{{2}})", first)
        require(heading is not None, f"CHANGELOG.md begins with '{first}', not with '## {version} - DATE'")
        for file, line in (
            ("helm/loraplex/Chart.yaml", rf'^appVersion: "?{re.escape(version)}"?$'),
            ("compose.yaml", rf"loraplex-engine:\$\{{TAG:-{re.escape(version)}\}}$"),
        ):
            require(bool(re.search(line, read(file), re.MULTILINE)), f"{file} has another version than {version}")
        tags = run("git", "tag", "--points-at", "HEAD").split()
        require(all(tag == f"v{version}" for tag in tags if tag.startswith("v")), f"this commit has the tags {tags}")
        is_dated = heading is not None and heading[1] != "unreleased"
        require(is_dated or f"v{version}" not in tags, "CHANGELOG.md says unreleased, and the commit has the tag")
        facts.append("dated" if is_dated else "unreleased: give it its date before the tag")


def read(name: str) -> str:
    """Return a file of the source."""
    return (ROOT / name).read_text(encoding="utf-8")


def build(work: Path, version: str) -> tuple[Path, Path]:
    """Build the sdist from the committed files, and the wheel from the sdist."""
    with step("sdist from HEAD, wheel from the sdist") as facts:
        source, dist = work / "source", work / "dist"
        source.mkdir()
        run("git", "archive", "--format=tar", f"--output={work}/source.tar", "HEAD")
        with tarfile.open(work / "source.tar") as archive:
            archive.extractall(source, filter="data")
        # the tools' environment has the pinned hatchling
        run(TOOLS / "python", "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=work)
        wheel, sdist = dist / f"loraplex-{version}-py3-none-any.whl", dist / f"loraplex-{version}.tar.gz"
        for file in (wheel, sdist):
            require(file.exists(), f"the build made {sorted(path.name for path in dist.iterdir())}")
            facts.append(f"{file.name} {file.stat().st_size / 2**20:.1f} MiB")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Each committed file of the packages is in the wheel and nothing else; the sdist has what packagers need."""
    tracked = run("git", "ls-files").split()
    with step("contents of the wheel") as facts:
        wanted = {
            place + file.removeprefix(folder)
            for folder, place in PACKAGES.items()
            for file in tracked
            if file.startswith(f"{folder}/")
        }
        found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        require(found == wanted, f"missing or too much:\n{list_lines(sorted(found ^ wanted))}")
        for kind in KINDS:
            require(any(kind in name for name in found), f"nothing with {kind}")
        facts.append(f"{len(found)} files")
    with step("contents of the sdist") as facts:
        prefix = sdist.name.removesuffix(".tar.gz") + "/"
        with tarfile.open(sdist) as archive:
            names = {member.name.removeprefix(prefix) for member in archive.getmembers() if not member.isdir()}
        wanted = {file for file in tracked if file.split("/")[0] in IN_SDIST}
        require(wanted <= names, f"missing:\n{list_lines(sorted(wanted - names))}")
        facts.append(f"{len(names)} files")


def create_venv(folder: Path, python: str) -> Path:
    """Return the Python of a new empty environment."""
    run(python, "-m", "venv", "--clear", folder / "venv", env=build_outside_environment())
    return folder / "venv" / "bin" / "python"


def install(python: Path, *words: str | Path) -> None:
    """Install with pip, outside the checkout."""
    run(python, "-m", "pip", "install", "--quiet", *words, cwd=python.parent, env=build_outside_environment())


def check_commands(python: Path, folder: Path, version: str) -> dict[str, str]:
    """Version, help and a new database, by the installed command; returns the environment that they ran in."""
    command = python.with_name("loraplex")
    env = build_outside_environment(LORAPLEX_DATA_DIR=str(folder / "data"))
    require(run(command, "--version", cwd=folder, env=env).strip() == version, "--version says another version")
    require("loraplex up --demo" in run(command, "--help", cwd=folder, env=env), "--help shows no way to begin")
    (folder / "data").mkdir()
    run(command, "db", "upgrade", cwd=folder, env=env)
    require(run(command, "db", "current", cwd=folder, env=env) != "", "the database has no revision")
    return env


def try_all(folder: Path, wheel: Path, version: str) -> None:
    """The wheel with its engine, in an empty environment: the demo answers."""
    folder.mkdir()
    with step("wheel with [engine] into an empty environment"):
        python = create_venv(folder, find_python("3.11") or find_python("3.12") or "python3")
        lock, cpu = ROOT / "requirements/lock.txt", ROOT / "requirements/cpu.txt"
        install(python, "-c", lock, "-c", cpu, f"{wheel}[engine]")
    with step("its --version, --help, db upgrade"):
        env = check_commands(python, folder, version)
    with step("its loraplex up --demo --once") as facts:
        del env["LORAPLEX_DATA_DIR"]
        output = run(python.with_name("loraplex"), "up", "--demo", "--once", cwd=folder, env=env)
        proof = re.search(r"One batch: .*?adapters", output)
        require(proof is not None, f"no batch of four:\n{output[-2000:]}")
        require("of 3 adapters" in output, "the batch did not hold three adapters")
        facts.append(proof[0] if proof else "")


def try_sdist(folder: Path, sdist: Path, version: str) -> None:
    """The sdist alone, built by pip: the control plane serves."""
    folder.mkdir()
    with step("sdist into an empty environment; --version, --help, db upgrade, gateway") as facts:
        python = create_venv(folder, find_python("3.11") or find_python("3.12") or "python3")
        install(python, "-c", ROOT / "requirements/lock.txt", sdist)
        facts.append(serve(python, folder, check_commands(python, folder, version)))


def serve(python: Path, folder: Path, env: dict[str, str]) -> str:
    """Start the gateway, wait until it is ready, ask it to stop; returns what /readyz said."""
    command = [python.with_name("loraplex"), "gateway", "--listen", "127.0.0.1:0"]
    log = folder / "gateway.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=stream, stderr=subprocess.STDOUT)
    try:
        url = _wait_for_url(process, log)
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            said = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        require(process.wait(60) == 0, f"the gateway ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()
    return f"/readyz {said}"


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())
        if found:
            try:
                urllib.request.urlopen(f"{found[0]}/readyz", timeout=5).close()
            except OSError:
                time.sleep(0.2)
                continue
            return found[0]
        time.sleep(0.2)
    raise StepError(f"the gateway is not ready:\n{log.read_text()[-2000:]}")


def find_python(minor: str) -> str | None:
    """Return an interpreter of this minor version: on the path, or one that pyenv has."""
    homes = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{minor}.*/bin/python"))
    for candidate in (shutil.which(f"python{minor}"), *map(str, homes)):
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        if candidate:
            done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
            if done.stdout.strip() == minor:
                return candidate
    return None


def try_python(folder: Path, minor: str, wheel: Path) -> None:
    """The control plane alone on one version of Python, from the hashed lock: imports, gateway, tests."""
    interpreter = find_python(minor)
    if interpreter is None:
        print(f"skipped       control plane on Python {minor}: no such interpreter here", flush=True)
        return
    folder.mkdir()
    with step(f"control plane on Python {minor}, by hashes, without torch") as facts:
        python = create_venv(folder, interpreter)
        lock = ROOT / "requirements/control-plane.txt"
        install(python, "--only-binary", ":all:", "--require-hashes", "-r", lock)
        install(python, "--no-deps", "--no-index", wheel)
        run(python, "-m", "pip", "check", cwd=folder)
        env = check_commands(python, folder, read_version())
        facts += [run(python, "-W", "error", "-c", IMPORT_ALL, cwd=folder, env=env).strip(), serve(python, folder, env)]
    with step(f"its tests on Python {minor}") as facts:
        install(python, "-c", ROOT / "requirements/lock.txt", *TEST_TOOLS)
        ignored = [word for file in NEED_MODELS for word in ("--ignore", file)]
        options = ("-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", f"--basetemp={folder}/pt")
        output = run(python, "-m", "pytest", *options, *ignored, *TESTS, env=build_outside_environment())
        facts.append(output.strip().splitlines()[-1].strip("= "))


if __name__ == "__main__":
    main(sys.argv[1:] or ("wheel", "sdist", *PYTHONS))
