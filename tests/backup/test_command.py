"""`loraplex backup`, as people and programs call it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from backup_world import find_artifacts, make_platform
from loraplex.cli.app import main


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_platform(tmp_path_factory.mktemp("command") / "data")


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any, str]:
    """Exit code, JSON and what was said."""
    code = main(["backup", *map(str, arguments)])
    out, said = capsys.readouterr()
    return code, json.loads(out) if out else None, said


def test_create_verify_restore(platform: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts, _ = run(capsys, "create", tmp_path / "b", "--data-dir", platform, "--json")
    assert (code, facts["is_whole"], facts["num_artifacts"], facts["damaged"]) == (0, True, 2, [])
    assert facts["secrets"] == ["admin.key", "engine.key", "key.pepper", "signing.pem"]
    assert [base["name"] for base in facts["bases"]] == ["tiny-llama"]
    assert "files" not in facts
    del facts["secrets_elsewhere"]
    assert run(capsys, "verify", tmp_path / "b", "--json")[:2] == (0, facts)
    code, facts, _ = run(capsys, "restore", tmp_path / "b", "--data-dir", tmp_path / "new", "--json")
    assert (code, facts["data_dir"], facts["base_folders"]) == (0, str(tmp_path / "new"), [])
    code, facts, _ = run(capsys, "verify", "--data-dir", tmp_path / "new", "--json")
    assert (code, facts["is_whole"], facts["num_artifacts"], facts["num_orphans"]) == (0, True, 2, 0)


def test_people_are_told_of_secrets_and_of_what_comes_next(
    platform: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, said = run(capsys, "create", tmp_path / "b", "--data-dir", platform)
    assert "whoever can read it can act as its administrator" in said
    assert "The base is not in it (tiny-llama)" in said
    _, _, said = run(capsys, "create", tmp_path / "bare", "--data-dir", platform, "--without-secrets")
    assert "without key.pepper no API key works" in said
    _, _, said = run(capsys, "verify", tmp_path / "b")
    assert "is whole: 2 adapters" in said
    _, _, said = run(capsys, "restore", tmp_path / "bare", "--data-dir", tmp_path / "new")
    assert "The backup has no admin.key, engine.key, key.pepper, signing.pem" in said
    assert f"loraplex up --data-dir {tmp_path / 'new'}" in said


def test_secrets_that_were_given_by_settings_are_named(
    platform: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(platform, tmp_path / "data"))
    (data / "key.pepper").unlink()
    monkeypatch.setenv("LORAPLEX_KEY_PEPPER", "given")
    _, facts, _ = run(capsys, "create", tmp_path / "b", "--data-dir", data, "--json")
    assert facts["secrets_elsewhere"] == ["LORAPLEX_KEY_PEPPER"]


def test_damage_ends_with_one(platform: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(shutil.copytree(platform, tmp_path / "data"))
    assert run(capsys, "create", tmp_path / "b", "--data-dir", data)[0] == 0
    artifact = next(find_artifacts(data / "objects"))
    (artifact / "files" / "adapter_config.json").unlink()
    code, facts, _ = run(capsys, "verify", "--data-dir", data, "--json")
    assert (code, [fault["kind"] for fault in facts["faults"]]) == (1, ["missing"])
    code, facts, _ = run(capsys, "create", tmp_path / "b2", "--data-dir", data, "--json")
    assert (code, facts["damaged"][0]["subject"][:71]) == (1, f"sha256:{artifact.name}")
    shutil.rmtree(next(find_artifacts(tmp_path / "b" / "objects")))
    code, facts, _ = run(capsys, "verify", tmp_path / "b", "--json")
    assert (code, {fault["kind"] for fault in facts["faults"]}) == (1, {"missing"})
    code = main(["backup", "restore", str(tmp_path / "b"), "--data-dir", str(tmp_path / "new"), "--json"])
    assert code == 1
    assert "not whole" in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["message"]
    assert not (tmp_path / "new").exists()
