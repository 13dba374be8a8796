"""What every part shares: tokens, ids, digests, names, settings."""

from __future__ import annotations

import base64
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from loraplex_registry.errors import SettingError, TokenError
from loraplex_registry.settings import load_settings
from loraplex_registry.wire.digest import artifact_path, check_digest
from loraplex_registry.wire.identity import (
    Identity,
    TokenSigner,
    TokenVerifier,
    generate_signing_key,
    split_public_keys,
)
from loraplex_registry.wire.ids import new_public_id, new_uuid
from loraplex_registry.wire.naming import InvalidNameError, check_name, is_alias_name, is_name, served_name
from loraplex_registry.wire.setting import SETTINGS, find_unknown, read_settings


def who(**changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "role": "tenant",
        "tenant_id": "t1",
        "tenant": "team-a",
        "scopes": ("infer", "adapters:read"),
        "key_id": "key_1",
        "actor": "ann",
        "request_id": "req_1",
    }
    return Identity(**fields | changes)


@pytest.fixture
def signer() -> TokenSigner:
    return TokenSigner(generate_signing_key())


def test_token_brings_the_identity_back(signer: TokenSigner) -> None:
    verifier = TokenVerifier([TokenSigner(generate_signing_key()).public_pem, signer.public_pem], "engine")
    for identity in (
        who(),
        who(role="admin", tenant_id=None, tenant=None, scopes=(), target_tenant="x", target_tenant_id="y"),
    ):
        assert verifier.verify(signer.sign(identity, "engine")) == identity


def test_token_of_another_audience_key_time_or_shape_is_refused(signer: TokenSigner) -> None:
    verifier = TokenVerifier([signer.public_pem], "engine")
    good = signer.sign(who(), "engine")
    head, body, mark = good.split(".")
    none = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": signer.kid}).encode()).rstrip(b"=").decode()
    for bad in (
        signer.sign(who(), "registry"),
        signer.sign(who(), "engine", ttl_s=-60),
        signer.sign(who(role="root"), "engine"),
        TokenSigner(generate_signing_key()).sign(who(), "engine"),
        f"{head}.{body}.{mark[:-4]}AAAA",
        f"{none}.{body}.",
        "",
        "a.b.c",
        "é",
    ):
        with pytest.raises(TokenError):
            verifier.verify(bad)


def test_scopes_by_role() -> None:
    assert who().has_scope("infer")
    assert not who().has_scope("adapters:write")
    assert who(role="admin", scopes=()).has_scope("adapters:write")
    reader = who(role="admin_readonly", scopes=())
    assert (reader.has_scope("usage:read"), reader.has_scope("adapters:write"), reader.has_scope("infer")) == (
        True,
        False,
        False,
    )
    assert (reader.is_admin, reader.is_platform) == (False, True)
    assert not who(role="engine", scopes=()).has_scope("adapters:read")


def test_ids_grow_and_look_as_promised() -> None:
    ids = [new_uuid() for _ in range(50)]
    assert sorted(ids) == ids
    assert {each.version for each in ids} == {7}
    public = new_public_id("evt")
    assert (len(public), public[:4], public == public.lower()) == (30, "evt_", True)


def test_digest_and_its_path() -> None:
    digest = "sha256:" + "0123456789abcdef" * 4
    assert check_digest(digest) == digest
    assert artifact_path(digest) == f"sha256/01/23/{digest[7:]}"
    for bad in ("", digest.upper(), digest[:-1], digest + "0", digest + "\n", "sha256:" + "g" * 64):
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            artifact_path(bad)


def test_names_are_exact() -> None:
    for good in ("a", "team-x", "0", "a" * 63):
        assert check_name(good) == good
    for bad in ("", "-a", "a-", "A", "a b", "a/b", ".", "..", "a\0b", "team-x ", "a" * 64, "\u00e9", "\u0661", "a\n"):
        assert not is_name(bad)
        with pytest.raises(InvalidNameError):
            check_name(bad, "tenant")
    assert is_alias_name("live")
    assert not any(is_alias_name(bad) for bad in ("3", "", "Live", "x" * 33, "-a", "a_b", "live\n"))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("/models/My Model__v2/", "my-model-v2"),
        ("C:\\models\\Tiny.Q8_0.GGUF", "tiny-q8-0"),
        ("x" * 80, "x" * 63),
        ("a" * 62 + "--b", "a" * 62),
    ],
)
def test_served_name_of_a_spec(spec: str, name: str) -> None:
    assert served_name(spec) == name
    assert is_name(name)


def test_settings_fill_defaults_and_know_files(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("s3cret\n")
    found = read_settings({"LORAPLEX_ENGINE_KEY_FILE": str(secret), "OTHER": "x", "LORAPLEX_LISTEN": ""}, "registry")
    assert found["engine_key"] == "s3cret"
    assert found["parity_gate"] == "when_available"
    # an empty value is none
    assert found["listen"] == "127.0.0.1:8081"
    assert "database_url" not in found
    assert "pools" not in found


@pytest.mark.parametrize(
    "environ",
    [
        {"LORAPLEX_DATABSE_URL": "x"},
        {"LORAPLEX_ENGINE_KEYS": "x"},
        {"LORAPLEX_ENGINE_KEY": "x", "LORAPLEX_ENGINE_KEY_FILE": "/y"},
        {"LORAPLEX_ENGINE_KEY_FILE": "/does/not/exist"},
    ],
)
def test_settings_refuse_near_misses_doubles_and_what_is_not_built(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="LORAPLEX_"):
        read_settings(environ, "registry")


@pytest.mark.parametrize(("name", "part"), [("LORAPLEX_PUBLIC_URL", "gateway"), ("LORAPLEX_TLS_CERT", "up")])
def test_settings_that_nobody_reads_are_refused_rather_than_ignored(name: str, part: str) -> None:
    with pytest.raises(SettingError, match=f"{name} is not supported yet"):
        read_settings({name: "1"}, part)


def test_far_names_are_logged_and_injected_ones_ignored(caplog: pytest.LogCaptureFixture) -> None:
    injected = {
        "LORAPLEX_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "LORAPLEX_GATEWAY_PORT_80_TCP": "x",
        "LORAPLEX_PORT": "tcp://x",
    }
    with caplog.at_level(logging.WARNING):
        read_settings({**injected, "LORAPLEX_SOMETHING_ELSE": "1"}, "client")
    assert [record.args for record in caplog.records] == [("LORAPLEX_SOMETHING_ELSE",)]


@pytest.mark.parametrize("name", ["LORAPLEX_" + "A" * 100_000, "LORAPLEX_" + "ENGINE_" * 10_000])
def test_a_very_long_name_takes_no_time(name: str) -> None:
    began_s = time.process_time()
    assert [found.is_fatal for found in find_unknown({name: "1"})] == [False]
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("name", "is_fatal"),
    [
        ("LORAPLEX_LISTE", True),
        ("LORAPLEX_LIST", True),
        ("LORAPLEX_LIS", False),
        ("LORAPLEX_LISTENED", True),
        ("LORAPLEX_LISTENINGS", False),
        ("LORAPLEX_LITSEN", True),
    ],
)
def test_two_edits_are_a_typo_and_three_are_not(name: str, is_fatal: bool) -> None:
    assert [found.is_fatal for found in find_unknown({name: "1"})] == [is_fatal]


def test_no_two_settings_are_within_a_typo_of_each_other_by_one_edit() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(set(names)) == len(names)
    assert all(setting.meaning for setting in SETTINGS)


def test_registry_settings_come_from_the_environment(signer: TokenSigner, tmp_path: Path) -> None:
    pem = signer.public_pem.decode()
    loaded = load_settings(
        {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_VERIFY_KEYS": pem, "LORAPLEX_LISTEN": "[::1]:9"}
    )
    assert loaded.registry.database_url == f"sqlite+aiosqlite:///{tmp_path}/loraplex.db"
    assert (loaded.host, loaded.port) == ("::1", 9)
    assert len(split_public_keys(json.dumps([pem, pem]))) == 2
    assert len(split_public_keys(pem + pem)) == 2
    for change in ({"LORAPLEX_VERIFY_KEYS": "x"}, {"LORAPLEX_LISTEN": "nine"}, {"LORAPLEX_PARITY_GATE": "on"}):
        with pytest.raises(SettingError):
            load_settings({"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_VERIFY_KEYS": pem} | change)
    for days in ("-1", "1.5", "36501", "\u0663"):
        with pytest.raises(SettingError, match="LORAPLEX_PURGE_AFTER_DAYS"):
            load_settings(
                {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_VERIFY_KEYS": pem, "LORAPLEX_PURGE_AFTER_DAYS": days}
            )
    with pytest.raises(SettingError, match="LORAPLEX_DATA_DIR"):
        load_settings({"LORAPLEX_VERIFY_KEYS": pem})
