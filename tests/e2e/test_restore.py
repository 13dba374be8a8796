"""A platform that is backed up at work and restored into an empty folder is the same platform to its clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.client.upload import list_files
from loraplex_engine.bases.pull import pull
from loraplex_registry.wire.adapter import Target
from platforms import ROOT, LivePlatform, running_platform
from support import write_adapter

TEAMS = {"team-a": ("default", "other"), "team-b": ("default",), "team-c": ("default",)}
SCOPES = ["infer", "adapters:read", "adapters:write", "usage:read"]
CANARIES = [f"client-{number}" for number in range(6)]
Answers = dict[tuple[str, str], tuple[str, str]]


@dataclass
class Teams:
    """Teams with adapters of two versions each, and an alias between them."""

    folder: Path
    base: Path
    keys: dict[str, str] = field(default_factory=dict)
    num_adapters: int = 0

    def fill(self, platform: LivePlatform) -> None:
        """Make them."""
        with platform.management() as client:
            for team, adapters in TEAMS.items():
                client.create_tenant(team)
                self.keys[team] = client.create_key(team, "app", scopes=SCOPES).key or ""
                for adapter in adapters:
                    self.push(platform, team, adapter)
                    self.push(platform, team, adapter)
                    client.set_alias(team, adapter, "canary", [Target(1, 60), Target(2, 40)])

    def push(self, platform: LivePlatform, team: str, adapter: str, **params: Any) -> None:
        """Upload new content."""
        self.num_adapters += 1
        folder = write_adapter(self.folder / f"adapter-{self.num_adapters}", self.base, seed=self.num_adapters, rank=4)
        with platform.management(self.keys[team]) as client:
            client.push(team, adapter, list_files(folder), lambda _: None, **params)

    def ask(self, platform: LivePlatform) -> Answers:
        """Text and digest of every adapter, version and alias, greedily, by the teams' own keys."""
        found: Answers = {}
        for team, adapters in TEAMS.items():
            with platform.openai(self.keys[team]) as client:
                names = [team, *(f"{team}/{name}@{version}" for name in adapters for version in (1, 2))]
                asked = [(name, "") for name in names]
                asked += [(f"{team}/{name}@canary", canary) for name in adapters for canary in CANARIES]
                for model, canary in asked:
                    raw = client.completions.with_raw_response.create(
                        model=model,
                        prompt="a b c",
                        temperature=0,
                        max_tokens=6,
                        extra_headers={"x-loraplex-canary-key": canary} if canary else {},
                    )
                    found[model, canary] = (raw.parse().choices[0].text, raw.headers["x-loraplex-digest"])
        return found


@contextmanager
def at_work(platform: LivePlatform, teams: Teams) -> Iterator[list[int]]:
    """Requests and uploads in the background; how many were answered by the end."""
    stop, counts = threading.Event(), [0, 0]

    def ask() -> None:
        with platform.openai(teams.keys["team-a"]) as client:
            while not stop.is_set():
                client.completions.create(model="team-a", prompt="b c d", temperature=0, max_tokens=8)
                counts[0] += 1

    def upload() -> None:
        while not stop.is_set():
            teams.push(platform, "team-c", "busy", promote="always")
            counts[1] += 1

    threads = [threading.Thread(target=work) for work in (ask, upload)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def run(*arguments: str | Path, **settings: str) -> Any:
    """Run a command and return what its JSON says."""
    argv = [sys.executable, "-m", "loraplex", *map(str, arguments), "--json"]
    env = os.environ | settings
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def list_ids(platform: LivePlatform) -> tuple[set[str], set[str]]:
    """The requests in usage and the events in audit."""
    with platform.management() as client:
        events = {event.id for event in client.list_events(1000)}
        return {row["request_id"] for row in client.list_usage_rows()}, events


def test_a_restored_platform_answers_the_same_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    base = pull(str(tiny_llama), tmp_path / "cache")
    flags = ("--dtype", "float32", "--max-loras", "3", "--max-model-len", "128")
    teams = Teams(tmp_path, base)
    with running_platform(tmp_path / "data", "--base", str(base), *flags) as platform:
        teams.fill(platform)
        before = teams.ask(platform)
        usage, audit = list_ids(platform)
        with at_work(platform, teams) as counts:
            places = (tmp_path / "backup", "--data-dir", tmp_path / "data")
            made = run("backup", "create", *places, "--with-base", LORAPLEX_CACHE_DIR=str(tmp_path / "cache"))
        assert min(counts) >= 1, "there was work meanwhile"
        assert made["num_artifacts"] >= 8
        with platform.management() as client:
            client.promote("team-a", "default", 2)
            (late,) = [key.id for key in client.list_keys("team-b")]
            client.revoke_key("team-b", late)
    assert len({digest for _, digest in before.values()}) == 8
    assert len({text for text, _ in before.values()}) > 4, "adapters differ"

    assert run("backup", "verify", tmp_path / "backup")["faults"] == []
    restored = run("backup", "restore", tmp_path / "backup", "--data-dir", tmp_path / "new")
    (base_folder,) = restored["base_folders"]
    with running_platform(tmp_path / "new", "--base", base_folder, *flags) as platform:
        assert platform.admin_key == (tmp_path / "data" / "admin.key").read_text().strip()
        assert teams.ask(platform) == before
        found_usage, found_audit = list_ids(platform)
        assert usage <= found_usage
        assert audit <= found_audit
        teams.push(platform, "team-b", "default", promote="always")
        with platform.management(teams.keys["team-b"]) as client:
            assert [version.version for version in client.list_versions("team-b", "default")] == [3, 2, 1]
        found = run("backup", "verify", "--data-dir", tmp_path / "new")
        assert (found["is_whole"], found["faults"]) == (True, [])
