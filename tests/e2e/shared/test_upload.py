"""Adapters that come and change while others are served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.errors import ClientError
from loraplex.client.upload import list_files
from platforms import EXAMPLES, LivePlatform, Team, create_team

LIBRARY = [{"role": "user", "content": "What is a library?"}]


def push(platform: LivePlatform, team: Team, folder: Path, **params: Any) -> Any:
    with platform.management(team.key) as client:
        return client.push(team.name, "default", list_files(folder), lambda _: None, **params)


def test_update_during_decoding_leaves_running_streams_on_the_old_version(platform: LivePlatform) -> None:
    team = create_team(platform, "team-update", "pirate")
    client = platform.openai(team.key)
    options: dict[str, Any] = {"model": team.name, "messages": LIBRARY, "temperature": 0, "max_tokens": 40}
    options["extra_body"] = {"ignore_eos": True}
    expected = client.chat.completions.create(**options).choices[0].message.content
    raw = client.chat.completions.with_raw_response.create(**options, stream=True)
    stream = raw.parse()
    pieces = [next(stream).choices[0].delta.content or "" for _ in range(3)]
    second = push(platform, team, EXAMPLES / "json", promote="always")
    assert (second.version, second.promoted) == (2, True)
    fresh = client.chat.completions.with_raw_response.create(**options | {"extra_body": None})
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == expected
    assert raw.headers["x-loraplex-digest"] == team.digest
    assert fresh.headers["x-loraplex-digest"] == second.digest
    assert fresh.headers["x-loraplex-model"] == "team-update/default@2"
    assert set(json.loads(fresh.parse().choices[0].message.content or "")) == {"topic", "answer"}


def test_same_content_again_is_the_same_version(platform: LivePlatform, teams: dict[str, Team]) -> None:
    again = push(platform, teams["legal"], EXAMPLES / "legal")
    assert (again.version, again.digest) == (1, teams["legal"].digest)


def test_refused_upload_carries_a_report_and_leaves_nothing(
    platform: LivePlatform, teams: dict[str, Team], tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(EXAMPLES / "pirate", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 4, "layer_replication": [[0, 2]]}))
    team = teams["pirate"]
    with platform.management(team.key) as client:
        before = client.list_versions(team.name, "default"), client.list_models()
        with pytest.raises(ClientError) as caught:
            client.push(team.name, "default", list_files(folder), lambda _: None)
        assert (client.list_versions(team.name, "default"), client.list_models()) == before
    assert (caught.value.status, caught.value.code) == (422, "adapter_rejected")
    assert caught.value.report is not None
    failed = {check.name for check in caught.value.report.checks if check.verdict == "fail"}
    assert failed >= {"field_unsupported"}


def test_promote_roll_back_retire_and_restore_by_command(platform: LivePlatform, tmp_path: Path) -> None:
    team = create_team(platform, "team-life", "pirate")
    pushed = platform.cli("adapters", "push", str(EXAMPLES / "legal"), "--as", team.name, "--json", key=team.key)
    assert pushed.returncode == 0, pushed.stderr
    assert (json.loads(pushed.stdout)["version"], json.loads(pushed.stdout)["promoted"]) == (2, False)
    name = f"{team.name}/default"
    for command, shown in (
        (("promote", f"{name}@2"), "is live"),
        (("rollback", name), "@1 is live again"),
        (("retire", f"{name}@2"), "retired"),
        (("restore", f"{name}@2"), "is ready"),
    ):
        done = platform.cli("adapters", *command, key=team.key)
        assert done.returncode == 0, done.stderr
        assert shown in done.stderr
    history = json.loads(platform.cli("adapters", "history", name, "--json", key=team.key).stdout)
    assert [[target["version"] for target in change["targets"]] for change in history] == [[1], [2], [1]]
    pulled = platform.cli("adapters", "pull", name, "--to", str(tmp_path / "copy"), key=team.key)
    assert pulled.returncode == 0, pulled.stderr
    for original in list_files(EXAMPLES / "pirate"):
        assert (tmp_path / "copy" / original.name).read_bytes() == original.read_bytes()
