"""A fault is found once, where it is: what follows from it does not fail too, and no remedy makes it worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_world import look, see, verdicts, write_folder
from loraplex.doctor.examination import examine
from loraplex.doctor.keys import check_keys
from loraplex.doctor.machine import check_disks
from loraplex.doctor.settings import check_settings
from loraplex.doctor.store import check_store
from loraplex.supervisor.data_folder import DataFolder
from loraplex.supervisor.errors import UpError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LORAPLEX_DATABASE_URL", "postgres://u:p@h/x"),
        ("LORAPLEX_DATABASE_URL", "nonsense"),
        ("LORAPLEX_REDIS_URL", "redisx://h"),
        ("LORAPLEX_POOLS", "["),
    ],
)
def test_a_value_that_is_not_valid_is_found_once(name: str, value: str, tmp_path: Path) -> None:
    write_folder(tmp_path, admin_key="an-admin-key-of-a-test", key_pepper=f"{'0123456789abcdef' * 4}\n")
    found = examine(see({"LORAPLEX_DATA_DIR": str(tmp_path), name: value})).findings
    bad = [(one.check, one.subject) for one in found if one.verdict == "fail"]
    assert bad == [("settings.values", name)]


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    patient = see({"LORAPLEX_DATA_DIR": str(place)}, "up")
    found = [one for one in check_disks(patient) if one.verdict == "fail"]
    assert [one.message for one in found] == [f"{place} (data folder) is a file, not a folder."]
    assert "LORAPLEX_DATA_DIR" in found[0].remedy
    assert verdicts(look(check_store, patient)) == {"store.writes": "skip"}
    with pytest.raises(UpError, match="a file, not a folder"), DataFolder(place).lock():
        pass


def test_key_files_that_a_copy_onto_a_full_disk_left_empty(tmp_path: Path) -> None:
    write_folder(tmp_path, admin_key="", key_pepper="", signing_pem="", engine_key="")
    patient = see({"LORAPLEX_DATA_DIR": str(tmp_path)}, "up")
    found = look(check_keys, patient)
    bad = {name: (one.message, one.remedy.partition(":")[0]) for name, one in found.items() if one.verdict == "fail"}
    restore = "Restore it from the backup"
    assert bad == {
        "keys.admin": (f"{tmp_path}/admin.key is empty.", f"{restore}."),
        "keys.pepper": (f"{tmp_path}/key.pepper is empty.", restore),
        "keys.engine": (f"{tmp_path}/engine.key is empty.", f"{restore}."),
        "keys.signing": (f"{tmp_path}/signing.pem is empty.", f"{restore}."),
    }
    assert "every API key" in found["keys.pepper"].remedy
    assert verdicts(look(check_settings, patient)) == {}
