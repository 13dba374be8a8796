"""SIGHUP: files of settings are read anew, what is wrong changes nothing, what takes a restart says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_registry.errors import SettingError
from loraplex_registry.wire.reload import Reloader


@pytest.fixture
def level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, text in {"POOLS": "{}", "LOG_LEVEL": "info", "DRAIN_S": "30", "ENGINE_KEY": "a-secret-key"}.items():
        (tmp_path / name).write_text(text)
        found[f"LORAPLEX_{name}_FILE"] = str(tmp_path / name)
    return found


@pytest.mark.usefixtures("level")
def test_what_changed_is_taken_and_what_is_wrong_is_not(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[str] = []

    def take(text: str) -> None:
        if text == "[]":
            raise SettingError("LORAPLEX_POOLS is not a JSON object of pools")
        taken.append(text)

    reloader = Reloader("gateway", environ, {"LORAPLEX_POOLS": take})
    caplog.set_level(logging.INFO)
    reloader.reload()
    assert (taken, caplog.messages) == ([], ["SIGHUP: no file of a setting has changed"])
    (tmp_path / "POOLS").write_text("[]")
    (tmp_path / "ENGINE_KEY").write_text("another-secret-key")
    (tmp_path / "LOG_LEVEL").unlink()
    caplog.clear()
    reloader.reload()
    assert taken == []
    said = "\n".join(caplog.messages)
    assert "LORAPLEX_POOLS stays as it was: LORAPLEX_POOLS is not a JSON object" in said
    assert "LORAPLEX_ENGINE_KEY has changed in its file; it is read at the next start" in said
    assert "LORAPLEX_LOG_LEVEL_FILE cannot be read" in said
    assert "secret-key" not in said
    (tmp_path / "POOLS").write_text('{"a": 1}')
    (tmp_path / "LOG_LEVEL").write_text("error")
    reloader.reload()
    assert taken == ['{"a": 1}']
    assert logging.getLogger().level == logging.ERROR


def test_the_table_and_the_parts_agree_on_what_is_read_anew(environ: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        Reloader("gateway", environ, {})
    with pytest.raises(AssertionError):
        Reloader("gateway", environ, {"LORAPLEX_POOLS": print, "LORAPLEX_DRAIN_S": print})
