"""Secrets that a machine makes for itself on first start."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.errors import SettingsError
from loraplex.keys.files import load_admin_key, load_pepper, load_signing_key
from loraplex_registry.wire.identity import TokenSigner


def test_admin_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    key, is_new = load_admin_key(None, tmp_path / "data")
    again, is_new_again = load_admin_key(None, tmp_path / "data")
    assert (is_new, is_new_again) == (True, False)
    assert key == again
    file = tmp_path / "data" / "admin.key"
    assert file.read_text() == key + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["admin.key"]


def test_a_given_admin_key_touches_no_file(tmp_path: Path) -> None:
    assert load_admin_key("a-key-of-my-own-choice", tmp_path) == ("a-key-of-my-own-choice", False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["short", "with blank in the middle", "nicht-ascii-schlüssel"])
def test_a_weak_admin_key_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_admin_key(key, None)
    assert key not in str(caught.value)


def test_without_a_data_folder_each_secret_must_be_given() -> None:
    for load, setting in (
        (load_admin_key, "LORAPLEX_ADMIN_KEY"),
        (load_pepper, "LORAPLEX_KEY_PEPPER"),
        (load_signing_key, "LORAPLEX_SIGNING_KEY"),
    ):
        with pytest.raises(SettingsError, match=setting):
            load(None, None)


def test_signing_key_and_pepper_survive_a_restart(tmp_path: Path) -> None:
    assert load_pepper(None, tmp_path) == load_pepper(None, tmp_path)
    first, second = load_signing_key(None, tmp_path), load_signing_key(None, tmp_path)
    assert TokenSigner(first).kid == TokenSigner(second).kid


@pytest.mark.parametrize("load", [load_admin_key, load_pepper, load_signing_key])
@pytest.mark.parametrize("left", ["", "\n"])
def test_a_file_that_a_full_disk_left_empty_is_no_secret(
    load: Callable[..., object], left: str, tmp_path: Path
) -> None:
    load(None, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(left)
    with pytest.raises(SettingsError, match=f"{file.name} is empty; put it back from a backup"):
        load(None, tmp_path)
