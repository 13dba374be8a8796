"""Real kubectl, without a cluster: its own types take every workload, and find the variables that we find."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from chart_tools import ToolUnavailable, find_kubectl
from chart_world import Object, Rendering, env_of
from conftest import skip_or_fail

WORKLOADS = ("Deployment", "StatefulSet", "Job", "Pod")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    try:
        return find_kubectl()
    except ToolUnavailable as reason:
        skip_or_fail("kubectl", str(reason))


def read(kubectl: Path, folder: Path, objects: list[Object], *words: str) -> str:
    (folder / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    command = [kubectl, *words, "--local", "-f", str(folder / "objects.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"HOME": str(folder), "KUBECONFIG": ""}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", ["production", "everything", "trial"])
def test_kubectl_finds_the_variables_of_each_container(
    kubectl: Path, render: Callable[[str], Rendering], tmp_path: Path, name: str
) -> None:
    text = read(kubectl, tmp_path, render(name).of_kind(*WORKLOADS), "set", "env", "--list")
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if ", container " in line:
            found[line] = current = set()
        elif line.startswith("# "):
            current.add(line.split(maxsplit=2)[1])
        else:
            current.add(line.partition("=")[0])
    expected = {
        f"# {pod.owner['kind']} {pod.owner['metadata']['name']}, container {one['name']}": set(env_of(one))
        for pod in render(name).pods
        for one in pod.containers
    }
    assert found == expected


def test_kubectl_names_each_object(kubectl: Path, render: Callable[[str], Rendering], tmp_path: Path) -> None:
    objects = render("everything").objects
    names = read(kubectl, tmp_path, objects, "label", "a=b", "-o", "name").split()
    assert len(names) == len(set(names)) == len(objects)
