"""An adapter that passed every check and cannot be loaded harms nobody else: from the first error to the way back."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex.client.upload import list_files
from loraplex_registry.wire.adapter import VersionView
from loraplex_registry.wire.digest import artifact_path
from platforms import EXAMPLES, LivePlatform, Team, wait_for

BASE = "smollm2-135m"
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a library?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def write_fresh(folder: Path) -> Path:
    """The pirate with a scaling that nobody ever loaded, so that no cache knows its digest."""
    shutil.copytree(EXAMPLES / "pirate", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    alpha = config["lora_alpha"] + random.SystemRandom().random() / 1000
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
    return folder


@pytest.fixture
def team(platform: LivePlatform, teams: dict[str, Team]) -> Team:
    return teams["pirate"]


@pytest.fixture
def name(request: pytest.FixtureRequest, team: Team) -> str:
    """An adapter of the test alone."""
    return "-".join(request.node.name.split("_")[1:4])


@pytest.fixture
def version(platform: LivePlatform, team: Team, name: str, tmp_path: Path) -> Iterator[VersionView]:
    """Fresh content, live and never loaded; deleted afterwards."""
    with platform.management(team.key) as client:
        yield client.push(team.name, name, list_files(write_fresh(tmp_path / "fresh")), lambda _: None)
        client.delete_adapter(team.name, name)


def find_weights(platform: LivePlatform, version: VersionView) -> Path:
    return platform.data_dir / "objects" / artifact_path(version.digest) / "files" / "adapter_model.safetensors"


def flip_last_byte(file: Path) -> None:
    content = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def ask(platform: LivePlatform, model: str, key: str | None = None, **fields: Any) -> tuple[int, str]:
    """The status of a chat, and its text or the error's code and message."""
    try:
        with platform.openai(key) as client:
            answer = client.chat.completions.create(model=model, **QUESTION | fields)
    except openai.APIStatusError as error:
        body: Any = error.body
        promises = error.status_code != 503 or int(error.response.headers["retry-after"]) >= 1
        return error.status_code, f"{body['code']}: {body['message']}" if promises else "no Retry-After"
    return 200, answer.choices[0].message.content or ""


def ask_until(platform: LivePlatform, model: str, status: int, limit_s: float) -> tuple[str, list[tuple[int, str]]]:
    """Ask as a patient client until `status` comes; returns that answer and those before it."""
    before: list[tuple[int, str]] = []
    deadline = time.monotonic() + limit_s
    while (found := ask(platform, model))[0] != status:
        before.append(found)
        assert time.monotonic() < deadline, before
        time.sleep(0.5)
    return found[1], before


def test_bytes_that_rot_after_upload_end_in_a_quarantine(
    platform: LivePlatform, team: Team, name: str, version: VersionView
) -> None:
    model, full = f"{team.name}/{name}", f"{team.name}/{name}@1"
    weights = find_weights(platform, version)
    healthy = ask(platform, BASE)
    flip_last_byte(weights)
    with platform.openai(team.key) as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=model, stream=True, **QUESTION)
    assert (caught.value.status_code, caught.value.code) == (503, "digest_mismatch")
    refusal, before = ask_until(platform, model, 409, limit_s=120)
    assert {status for status, _ in before} <= {503}
    assert refusal.startswith("adapter_quarantined: ")
    assert "new version" in refusal
    assert (ask(platform, BASE), ask(platform, team.name)[0]) == (healthy, 200)

    with platform.management() as client:
        wait_for(lambda: client.get_version(team.name, name, 1).state == "quarantined")
        shown = client.get_version(team.name, name, 1)
        assert shown.quarantine is not None
        assert (shown.quarantine.reason, shown.promoted) == ("load_failed", True)
        (engine,) = client.list_fleet()
        load = engine.state.failed[version.digest]
        assert (load.is_final, load.attempts) == (True, 5)
        spent = [row for row in client.list_usage(tenant=team.name, group_by="adapter") if row["adapter"] == name]
    assert [(row["prompt_tokens"], row["completion_tokens"], row["requests_ok"]) for row in spent] == [(0, 0, 0)]
    assert model not in [found.id for found in platform.openai().models.list()]
    status, refusal = ask(platform, model)
    assert (status, "load_failed" in refusal, shown.quarantine.since in refusal) == (409, True, True)
    assert "given up" in platform.cli("status").stdout

    flip_last_byte(weights)
    assert platform.cli("adapters", "release", full, key=team.key).returncode != 0
    released = platform.cli("adapters", "release", full)
    assert released.returncode == 0, released.stderr
    text, _ = ask_until(platform, model, 200, limit_s=120)
    assert "Arrr" in text
    assert model in [found.id for found in platform.openai().models.list()]


def test_files_that_vanish_fail_their_own_requests_until_they_are_back(
    platform: LivePlatform, team: Team, name: str, version: VersionView, tmp_path: Path
) -> None:
    model = f"{team.name}/{name}"
    folder = find_weights(platform, version).parents[1]
    healthy = ask(platform, BASE)
    folder.rename(tmp_path / "away")
    status, refusal = ask(platform, model)
    assert (status, refusal) == (503, "adapter_loading: The registry does not have this adapter's files.")
    assert (ask(platform, BASE), ask(platform, team.name)[0]) == (healthy, 200)
    with platform.management() as client:
        for _ in range(6):
            assert ask(platform, model)[0] == 503
            time.sleep(1)
        assert client.get_version(team.name, name, 1).state == "ready"
    (tmp_path / "away").rename(folder)
    text, before = ask_until(platform, model, 200, limit_s=120)
    assert "Arrr" in text
    assert {status for status, _ in before} <= {503}
