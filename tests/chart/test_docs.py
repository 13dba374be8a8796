"""docs/kubernetes.md: its commands make what the programs take, its values are values."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from chart_page import resolve
from chart_values import SCHEMA
from chart_world import CHART, ROOT, Pod, Rendering
from conftest import skip_or_fail
from loraplex_registry.wire.identity import TokenSigner, TokenVerifier

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_the_keys_that_it_makes_are_those_that_the_parts_take(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        skip_or_fail("openssl", "there is none")
    for command in re.findall(r"^ *(openssl (?:genpkey|pkey) .*)$", PAGE, re.MULTILINE):
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    signer = TokenSigner((tmp_path / "signing.pem").read_bytes())
    assert signer.public_pem == (tmp_path / "verify.pem").read_bytes()


def test_the_token_that_it_makes_reads_metrics(tmp_path: Path) -> None:
    signing = tmp_path / "signing.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", signing], check=True, capture_output=True)
    (program,) = re.findall(r"<<'PY'\n(.*?)^PY$", PAGE, re.MULTILINE | re.DOTALL)
    place = "/etc/loraplex/secrets/SIGNING_KEY"
    assert place in program
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-P"],
        input=program.replace(place, str(signing)),
        text=True,
        check=True,
        capture_output=True,
        env=environ,
    )
    verifier = TokenVerifier([TokenSigner(signing.read_bytes()).public_pem], "engine")
    identity = verifier.verify(done.stdout.strip())
    assert (identity.role, identity.scopes) == ("tenant", ("metrics:read",))
    assert identity.tenant is None
    assert not identity.has_scope("infer")


def test_the_secrets_that_it_makes_are_those_that_the_parts_want(render: Callable[[str], Rendering]) -> None:
    made = set(re.findall(r"--from-(?:literal|file)=([a-z-]+)=", PAGE))
    wanted = set()
    for pod in render("production").pods:
        for volume in pod.spec["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                wanted |= {item["key"] for item in source["secret"]["items"]}
        for container in pod.containers:
            wanted |= {one["valueFrom"]["secretKeyRef"]["key"] for one in container["env"] if "valueFrom" in one}
    for one in render("production").of_kind("ServiceMonitor"):
        wanted |= {endpoint["authorization"]["credentials"]["key"] for endpoint in one["spec"]["endpoints"]}
    assert made == wanted
    readme = (CHART / "README.md").read_text().partition("## Values")[0]
    table = "".join(line.partition("|")[2].partition("|")[0] for line in readme.splitlines() if line.startswith("| `"))
    assert {key for key in wanted if f"`{key}`" in table} == wanted - {
        *("access-key-id", "secret-access-key", "engine-token", "gateway-key"),
    }


def test_its_values_are_values() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [error.message for error in Draft7Validator(SCHEMA).iter_errors(yaml.safe_load(block))] == []
    for path in re.findall(
        r"`((?:engine|gateway|registry|monitoring|migration|networkPolicy|httpRoute|ingress)\.[a-zA-Z.]+)[`=]", PAGE
    ):
        rule: dict[str, Any] = SCHEMA
        for name in path.split("."):
            rule = resolve(rule["properties"][name])


def test_its_names_are_those_of_a_release_called_loraplex(render: Callable[[str], Rendering]) -> None:
    found = {
        f"{one['kind'].lower()}/{one['metadata']['name'].removeprefix('rel-')}"
        for name in ("trial", "production")
        for one in render(name).objects
    }
    short = {"deploy": "deployment"}
    for kind, name in re.findall(r"\b(service|deploy|statefulset)/(loraplex-[a-z-]+)", PAGE):
        assert f"{short.get(kind, kind)}/{name}" in found


@pytest.mark.parametrize("word", ["Not tested, for want of a cluster", "restricted", "computes on the CPU"])
def test_it_says_what_is_not_so(word: str) -> None:
    assert word in " ".join(PAGE.split())


def test_the_drain_that_it_names_is_the_chart_s(render: Callable[[str], Rendering]) -> None:
    (stated,) = re.findall(r"`drainSeconds` \((\d+)\)", PAGE)
    pods: list[Pod] = [*render("production").pods_of("gateway"), *render("production").pods_of("engine")]
    for pod in pods:
        assert {one["name"]: one.get("value") for one in pod.main["env"]}["LORAPLEX_DRAIN_S"] == stated
