"""schemathesis against a running platform: all checks, valid and invalid data, with four kinds of keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.openapi.document import OPERATIONS
from loraplex_engine.bases.pull import pull
from platforms import ROOT, running_platform
from support import tiny_llama_config, write_adapter, write_base

TESTS = ROOT / "tests"
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
READ = ["adapters:read", "usage:read", "audit:read", "metrics:read"]
ALL = [*READ, "infer", "adapters:write", "keys:write", "escalations:write"]
NAMES: dict[str, Any] = {"tenant": "team-x", "adapter": "bot", "alias": "live", "number": 1, "model": "team-x/bot"}
NAMES |= {"name": "adapter_config.json"}
KEYS = "/api/v1/tenants/team-x/keys"
ADAPTERS = ("one", "two")
UNREACHED = {
    # schemathesis reads it and calls it no more
    "showApi",
    # these need a pool of engines that serves a full fine-tune
    "registerEscalation",
    "activateEscalation",
    "revertEscalation",
}
"""Operations that no call of an administrator here can succeed with."""
_serial = count()


@dataclass(frozen=True)
class Target:
    """A platform with a tenant, an adapter of two versions, and a key of each kind."""

    url: str
    keys: dict[str, str]
    key_ids: list[str]
    adapters: list[str]
    """Folders of two adapters."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    # pulled here: the machine's cache keeps the name of a base for the next run
    base = pull(str(write_base(folder / "tiny", tiny_llama_config())), folder / "bases")
    with running_platform(folder / "data", "--base", str(base), "--max-model-len", "256") as platform:
        headers = {"authorization": f"Bearer {platform.admin_key}"}
        with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as http:
            keys, key_ids = _furnish(http, folder, base)
            yield Target(platform.url, keys | {"none": ""}, key_ids, [str(folder / name) for name in ADAPTERS])


def _furnish(http: httpx.Client, folder: Path, base: Path) -> tuple[dict[str, str], list[str]]:
    """Make what `NAMES` names, and return keys of each kind with their ids.

    The team's come from an administrator who is not the one that calls: nobody approves what they, or who issued their
    key, asked for.
    """
    http.post("/api/v1/tenants", json={"name": "team-x"}).raise_for_status()
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / name, base, rank=2, seed=seed)
        files = [("files", (path.name, path.read_bytes())) for path in sorted((folder / name).iterdir())]
        http.post("/api/v1/tenants/team-x/adapters/bot/versions", files=files).raise_for_status()
    made: dict[str, dict[str, Any]] = {}
    for name, fields, by in (
        ("admin", {"role": "admin"}, None),
        ("other_admin", {"role": "admin"}, None),
        ("tenant", {"scopes": ALL}, "other_admin"),
        ("read_only", {"scopes": READ}, "other_admin"),
    ):
        headers = {} if by is None else {"authorization": f"Bearer {made[by]['key']}"}
        answer = http.post(KEYS, json={"name": name, "owner": name, **fields}, headers=headers)
        made[name] = answer.raise_for_status().json()
    return {name: key["key"] for name, key in made.items()}, [key["id"] for key in made.values()]


def _run(target: Target, key: str, folder: Path, *options: str) -> set[str]:
    """Run schemathesis and return the operations that have succeeded; its own report is the message of a failure."""
    argv = [str(SCHEMATHESIS), "--config-file", str(TESTS / "api_fuzz.toml"), "run", f"{target.url}/openapi.json"]
    argv += ["--checks", "all", "--mode", "all", "--continue-on-failure", "--no-color", "--generation-database", "none"]
    # on a busy machine a request may take as long as it likes
    argv += ["--suppress-health-check", "filter_too_much,too_slow"]
    if key:
        argv += ["--header", f"Authorization: Bearer {key}"]
    env = os.environ | {
        "SCHEMATHESIS_HOOKS": "api_fuzz_hooks",
        "PYTHONPATH": str(TESTS),
        "LORAPLEX_TEST_FUZZ_NAMES": json.dumps(NAMES),
        "LORAPLEX_TEST_FUZZ_KEPT_KEYS": json.dumps(target.key_ids),
        "LORAPLEX_TEST_FUZZ_STOCK": json.dumps(_describe_stock(target)),
        "LORAPLEX_TEST_FUZZ_LOG": str(folder / "calls"),
    }
    done = subprocess.run([*argv, *options], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    return {name for name, status in calls if status.startswith("2")}


def _describe_stock(target: Target) -> dict[str, Any]:
    """What the hooks need to make things; their names are new in each run."""
    return {
        "url": target.url,
        "admin_key": target.keys["admin"],
        "team_key": target.keys["tenant"],
        "tenant": NAMES["tenant"],
        "model": NAMES["model"],
        "prefix": f"stock-{next(_serial)}",
        "folders": target.adapters,
    }


@pytest.mark.endure
@pytest.mark.parametrize("kind", ["admin", "tenant", "read_only", "none"])
def test_schemathesis_finds_nothing(target: Target, kind: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--endure"):
        options = ("--max-examples", "100", "--phases", "coverage,fuzzing,stateful")
        succeeded = _run(target, target.keys[kind], tmp_path, *options)
        if kind == "admin":
            # what only ever met 404 was not tested
            assert {operation.name for operation in OPERATIONS if operation.answers} - succeeded == UNREACHED
        return
    if kind in ("read_only", "none"):
        pytest.skip("the keys that may do most are tried; `make endure` has all four")
    # a team's key calls models, an administrator's everything
    where = ("--include-path-regex", "^/v1/") if kind == "tenant" else ()
    _run(target, target.keys[kind], tmp_path, "--max-examples", "1", "--phases", "fuzzing", "--seed", "6", *where)
