"""The chart as tests see it: what it renders for sets of values, and what its objects mean to one another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "loraplex"
RELEASE, NAMESPACE = "rel", "prod"
Object = dict[str, Any]
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


class ChartError(Exception):
    """Helm refused; the message is what it said."""


def run_helm(helm: Path, *arguments: str) -> str:
    """Return what helm printed.

    Raises:
        ChartError: It refused.
    """
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise ChartError(done.stderr + done.stdout)
    return done.stdout


def write_values(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write values as a file that helm reads."""
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    return path


def template(helm: Path, *files: Path, more: tuple[str, ...] = ()) -> list[Object]:
    """Return the objects of a release."""
    arguments = [word for file in files for word in ("-f", str(file))]
    text = run_helm(helm, "template", RELEASE, str(CHART), "-n", NAMESPACE, *arguments, *more)
    return [one for one in yaml.load_all(text, _Loader) if one]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key twice in a mapping, where the last one would win unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice among {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]


class Rendering:
    """The objects that one set of values gives."""

    def __init__(self, name: str, objects: list[Object]) -> None:
        self.name = name
        self.objects = objects

    def of_kind(self, *kinds: str) -> list[Object]:
        """Return the objects of some kinds."""
        return [one for one in self.objects if one["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        """Return one object."""
        (found,) = [one for one in self.of_kind(kind) if one["metadata"]["name"] == f"{RELEASE}-loraplex-{name}"]
        return found

    @cached_property
    def pods(self) -> list[Pod]:
        """Every pod that the objects make, once each."""
        return [Pod(one) for one in self.objects if one["kind"] == "Pod" or "template" in one.get("spec", {})]

    def pods_of(self, component: str, pool: str | None = None) -> list[Pod]:
        """Return the pods of a component."""
        found = [pod for pod in self.pods if pod.component == component]
        return [pod for pod in found if pool is None or pod.labels.get("loraplex.io/pool") == pool]


class Pod:
    """A pod as its owner's template, or the object itself, has it."""

    def __init__(self, owner: Object) -> None:
        self.owner = owner
        self.template = owner if owner["kind"] == "Pod" else owner["spec"]["template"]
        self.spec: Object = self.template["spec"]
        self.labels: dict[str, str] = self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        """What the pod is."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        """All containers, those of the start too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        """The one container that stays."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def volumes(self) -> set[str]:
        """Names of volumes, those by claims too."""
        claims = self.owner["spec"].get("volumeClaimTemplates", [])
        return {one["name"] for one in self.spec.get("volumes", [])} | {one["metadata"]["name"] for one in claims}


def env_of(container: Object) -> dict[str, str]:
    """Return a container's variables; of those that stand elsewhere the reference as text."""
    return {one["name"]: one.get("value", json.dumps(one.get("valueFrom"))) for one in container.get("env", [])}


def matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Say whether a label selector means these labels; an empty one means all."""
    found = selector or {}
    assert found.keys() <= {"matchLabels"}, "the chart uses nothing else"
    return all(labels.get(name) == value for name, value in found.get("matchLabels", {}).items())


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf of a document with its path."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from walk(one, (*path, str(name)))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from walk(one, (*path, str(index)))
    else:
        yield path, value
