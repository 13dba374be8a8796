"""Backups of a database that the next release has upgraded already, made by this one, which it serves still, or not."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from backup_world import Silent, build_source, make_platform
from loraplex.backup.create import create
from loraplex.backup.errors import NewerError
from loraplex.backup.restore import restore
from loraplex.backup.verify import audit, verify
from loraplex.cli.app import main
from loraplex_registry.app import head

FUTURE = "0099_future"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_platform(tmp_path_factory.mktemp("ahead") / "data")


def _back_up_ahead(platform: Path, folder: Path, *, is_served: bool) -> Path:
    data = Path(shutil.copytree(platform, folder / "data"))
    with closing(sqlite3.connect(data / "loraplex.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (FUTURE,))
        connection.execute("INSERT INTO compatible_revision VALUES (?)", (FUTURE,))
        if not is_served:
            connection.execute("DELETE FROM compatible_revision WHERE revision = ?", (head(),))
    create(build_source(data), folder / "b", Silent())
    return folder / "b"


def test_one_that_serves_this_program_is_verified_and_restored_as_it_is(
    platform: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = _back_up_ahead(platform, tmp_path, is_served=True)
    manifest, faults = verify(backup, Silent())
    assert (manifest.revision, faults) == (FUTURE, [])
    assert main(["backup", "restore", str(backup), "--data-dir", str(tmp_path / "new"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["revision"], facts["now_at"]) == (FUTURE, FUTURE)
    found = audit(build_source(tmp_path / "new").database_url, f"file://{tmp_path}/new/objects", None, Silent())
    assert (found.faults, found.num_artifacts, found.revision) == ([], 2, FUTURE)
    assert main(["backup", "restore", str(backup), "--data-dir", str(tmp_path / "newer")]) == 0
    assert "database went" not in capsys.readouterr().err


def test_one_that_left_this_program_behind_is_refused(platform: Path, tmp_path: Path) -> None:
    backup = _back_up_ahead(platform, tmp_path, is_served=False)
    with pytest.raises(NewerError, match=FUTURE):
        verify(backup, Silent())
    with pytest.raises(NewerError, match=FUTURE):
        restore(backup, tmp_path / "new", Silent())
    assert not (tmp_path / "new").exists()
