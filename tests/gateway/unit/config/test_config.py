"""`loraplex config`: what holds, from where, and what would keep a part from starting; never a secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.cli.config import app
from loraplex.config.judge import judge
from loraplex.config.resolved import choose_part, resolve
from loraplex_engine.config import EngineConfig
from loraplex_engine.flags import FLAGS, LATER, SWITCHES
from loraplex_registry.app import check_store_url, load_settings
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from loraplex_registry.wire.setting import PARTS, SETTINGS, Setting, mask

PEM = generate_signing_key().decode()
PUBLIC = TokenSigner(PEM.encode()).public_pem.decode()
BY_NAME = {setting.name: setting for setting in SETTINGS}


def _problems(environ: Mapping[str, str], part: str, **flags: str) -> dict[str, str]:
    given = {f"LORAPLEX_{name.upper()}": value for name, value in flags.items()}
    found = judge(resolve(environ, part, given), environ, load_settings, check_store_url)
    return {one.setting: one.message for one in found}


def test_each_source_wins_over_the_next(tmp_path: Path) -> None:
    secret = tmp_path / "engine-key"
    secret.write_text("a-key-in-a-file\n")
    (tmp_path / "key.pepper").write_text("of-the-folder\n")
    environ = {
        "LORAPLEX_DATA_DIR": str(tmp_path),
        "LORAPLEX_ENGINE_KEY_FILE": str(secret),
        "LORAPLEX_ENGINE_MAX_LORAS": "4",
        "LORAPLEX_ENGINE_MAX_NUM_SEQS": "2",
    }
    found = resolve(environ, "up", {"LORAPLEX_ENGINE_MAX_LORAS": "16"}).settings
    shown = {name: (one.value, one.source, one.path) for name, one in found.items()}
    assert shown["LORAPLEX_ENGINE_MAX_LORAS"] == ("16", "flag", None)
    assert shown["LORAPLEX_ENGINE_MAX_NUM_SEQS"] == ("2", "environment", None)
    assert shown["LORAPLEX_ENGINE_KEY"] == ("a-key-in-a-file", "file", str(secret))
    assert shown["LORAPLEX_KEY_PEPPER"] == ("of-the-folder", "file", str(tmp_path / "key.pepper"))
    assert shown["LORAPLEX_DATABASE_URL"] == (f"sqlite+aiosqlite:///{tmp_path}/loraplex.db", "default", None)
    assert shown["LORAPLEX_ENGINE_BLOCK_SIZE"] == ("16", "default", None)
    assert shown["LORAPLEX_ADMIN_KEY"] == (None, "none", None)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DATABASE_URL", "postgresql+psycopg://u:p%40ss@h:5432/db?sslmode=require&sslpassword=x", "u:***@h:5432/db"),
        ("DATABASE_URL", 'postgresql+psycopg://u:p@s/s"w d@h/db', "postgresql+psycopg://u:***@h/db"),
        ("DATABASE_URL", "no-url-but-a-password", "*** (21 characters)"),
        ("REDIS_URL", "rediss://:p@ss@h:6379/0", "rediss://:***@h:6379/0"),
        ("ENGINE_KEY", "http://u:a-key@h", "*** (16 characters)"),
        ("REGISTRY_URL", "http://u:secret@h:8081", "http://u:***@h:8081"),
        ("OBJECT_STORE_URL", "s3://k:secret@bucket/x", "s3://k:***@bucket/x"),
    ],
)
def test_secrets_are_masked_also_in_urls(name: str, value: str, shown: str) -> None:
    masked = mask(BY_NAME[f"LORAPLEX_{name}"], value)
    assert shown in masked
    assert not any(secret in masked for secret in ("p%40ss", "p@ss", "p@s/s", "secret", "=x", "a-key", "no-url"))


def test_the_command_shows_every_setting_of_every_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LORAPLEX_KEY_PEPPER", "a-pepper-that-nobody-sees")
    monkeypatch.setenv("LORAPLEX_POLLS", "{}")
    monkeypatch.setenv("LORAPLEX_ENGINE_MAX_LORA_SIZE", "1")
    app(["--json", "--max-loras", "16"], result_action="return_value")
    printed = capsys.readouterr().out
    found = json.loads(printed)
    servers = {one.name for one in SETTINGS if one.is_built and set(one.parts) - {"client"}}
    assert {one["name"] for one in found["settings"]} == servers
    loras = next(one for one in found["settings"] if one["name"].endswith("MAX_LORAS"))
    assert (loras["value"], loras["source"], loras["parts"]) == ("16", "flag", ["engine", "up"])
    assert {one["name"]: (one["nearest"], one["is_fatal"]) for one in found["unknown"]} == {
        "LORAPLEX_POLLS": ("LORAPLEX_POOLS", True),
        "LORAPLEX_ENGINE_MAX_LORA_SIZE": ("LORAPLEX_ENGINE_MAX_LORAS", False),
    }
    assert "a-pepper-that-nobody-sees" not in printed
    app([], result_action="return_value")
    table = capsys.readouterr()
    assert all(name in table.out for name in servers)
    assert "the nearest is LORAPLEX_POOLS" in table.err
    assert "a-pepper-that-nobody-sees" not in table.out


def test_an_engine_that_would_start_is_judged_by_its_own_program() -> None:
    environ = {"LORAPLEX_VERIFY_KEYS": PUBLIC, "LORAPLEX_ENGINE_BASE": "tiny"}
    assert _problems(environ, "engine") == {}
    assert "LORAPLEX_ENGINE_MAX_LORA_RANK" in _problems(environ, "engine", engine_max_lora_rank="1000")


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("gateway", {}, "gateway"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_POOLS": "[]"}, "LORAPLEX_POOLS"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_SIGNING_KEY": PUBLIC}, "LORAPLEX_SIGNING_KEY"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_ADMIN_KEY": "short"}, "LORAPLEX_ADMIN_KEY"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_DATABASE_URL": "mysql://h/x"}, "LORAPLEX_DATABASE_URL"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_OBJECT_STORE_URL": "ftp://x"}, "LORAPLEX_OBJECT_STORE_URL"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_REGISTRY_URL": "http://h"}, "gateway"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_TLS_KEY": "x"}, "LORAPLEX_TLS_KEY"),
        ("gateway", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_POOL": "{}"}, "LORAPLEX_POOL"),
        ("registry", {"LORAPLEX_DATA_DIR": "/srv"}, "registry"),
        ("registry", {"LORAPLEX_DATA_DIR": "/srv", "LORAPLEX_VERIFY_KEYS": PEM}, "LORAPLEX_VERIFY_KEYS"),
        ("client", {"LORAPLEX_URL": "example.com"}, "LORAPLEX_URL"),
        ("client", {"LORAPLEX_API_KEY": ""}, "LORAPLEX_API_KEY"),
    ],
)
def test_what_keeps_a_part_from_starting_is_named(part: str, change: dict[str, str], named: str) -> None:
    found = _problems(change, part)
    assert named in found
    assert PEM.splitlines()[1] not in str(found)


def test_the_check_command_ends_with_one_and_says_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    words = ["check", "--part", "gateway", "--json"]
    assert app(words, result_action="return_value") == 0
    assert json.loads(capsys.readouterr().out)["is_valid"] is True
    monkeypatch.setenv("LORAPLEX_LOG_LEVEL", "loud")
    monkeypatch.setenv("LORAPLEX_DRAIN_S", "soon")
    assert app(words, result_action="return_value") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {one["setting"] for one in problems} == {"LORAPLEX_LOG_LEVEL", "LORAPLEX_DRAIN_S"}


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({}, "up"),
        ({"LORAPLEX_DATA_DIR": "/srv"}, "up"),
        ({"LORAPLEX_URL": "http://h"}, "client"),
        ({"LORAPLEX_DATABASE_URL": "x", "LORAPLEX_URL": "http://h"}, "gateway"),
        ({"LORAPLEX_DATABASE_URL": "x", "LORAPLEX_VERIFY_KEYS_FILE": "x"}, "registry"),
        ({"LORAPLEX_REGISTRY_URL": "http://h", "LORAPLEX_VERIFY_KEYS": "x"}, "engine"),
    ],
)
def test_the_part_is_told_from_its_environment(environ: dict[str, str], part: str) -> None:
    assert choose_part(environ) == part


def test_defaults_of_the_table_are_those_of_the_engine() -> None:
    config = EngineConfig(base="", cache_dir="")
    for flag in FLAGS:
        setting = BY_NAME[f"LORAPLEX_ENGINE_{flag.name.upper().replace('-', '_')}"]
        held = getattr(config, flag.field)
        if setting.default is None:
            assert setting.otherwise, f"{setting.name} says nothing of what holds without it"
            assert not held
        else:
            assert flag.parse(setting.default) == held
    for later in (*LATER, *SWITCHES):
        assert BY_NAME[f"LORAPLEX_ENGINE_{later.name.upper().replace('-', '_')}"].default == later.only


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.name)
def test_the_table_names_known_parts(setting: Setting) -> None:
    assert set(setting.parts) <= set(PARTS)
    assert set(setting.reloads) <= set(setting.parts)
    assert set(setting.part_to_default) <= set(setting.parts)
