"""Backups of a platform: what is in them, what is found wrong with them, what a restore makes of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command

from backup_world import SECRETS, Silent, build_source, digest_of_tree, find_artifacts, make_platform
from loraplex.backup.create import create
from loraplex.backup.errors import BackupError, NewerError, NotWholeError, UnsupportedPlaceError
from loraplex.backup.manifest import BackupManifest, encode_manifest, read_manifest, seal
from loraplex.backup.restore import restore
from loraplex.backup.verify import audit, verify
from loraplex.supervisor.base import SPEC_FILE
from loraplex_registry.db import migration
from registry_world import build_tiny_spec


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A platform at rest that no test changes."""
    return make_platform(tmp_path_factory.mktemp("backup") / "data")


@pytest.fixture(scope="module")
def made(platform: Path) -> Path:
    """A backup of it that no test changes."""
    folder = platform.parent / "made"
    create(build_source(platform), folder, Silent())
    return folder


@pytest.fixture
def backup(made: Path, tmp_path: Path) -> Path:
    """A backup of this test alone."""
    return Path(shutil.copytree(made, tmp_path / "backup"))


def test_a_backup_is_one_folder_of_private_files(platform: Path, made: Path) -> None:
    manifest, faults = verify(made, Silent())
    assert faults == []
    assert (manifest.num_artifacts, manifest.damaged, manifest.list_names("secrets")) == (2, (), sorted(SECRETS))
    assert [base.name for base in manifest.bases] == ["tiny-llama"]
    files = [path for path in made.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*") if path.is_dir()} == {0o700}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert not list(made.parent.glob(".made.*"))


def test_a_restored_folder_holds_the_same_bytes(platform: Path, made: Path, tmp_path: Path) -> None:
    restore(made, tmp_path / "new", Silent())
    before, after = digest_of_tree(platform), digest_of_tree(tmp_path / "new")
    assert {path for path in before if path.startswith("objects/sha256/")} <= after.keys()
    assert {path: after[path] for path in after if path != "loraplex.db"} == {
        path: before[path] for path in after if path != "loraplex.db"
    }
    assert set(after) - set(before) == set()
    assert {path for path in after if "/" not in path} == {*SECRETS, "loraplex.db"}
    assert _dump(tmp_path / "new") == _dump(platform)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def _dump(data_dir: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(data_dir / "loraplex.db")) as connection:
        return sorted(connection.iterdump())


def test_secrets_stay_out_if_told_so(platform: Path, tmp_path: Path) -> None:
    manifest = create(build_source(platform), tmp_path / "b", Silent(), with_secrets=False)
    assert manifest.list_names("secrets") == []
    texts = [text.strip().encode() for text in SECRETS.values()]
    assert not any(
        text in path.read_bytes() for path in (tmp_path / "b").rglob("*.*") if path.is_file() for text in texts
    )
    restore(tmp_path / "b", tmp_path / "new", Silent())
    assert not any((tmp_path / "new" / name).exists() for name in SECRETS)


def test_a_base_is_copied_with_the_weights_that_it_refers_to(platform: Path, tmp_path: Path) -> None:
    source = build_source(platform, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(BackupError, match="loraplex base pull"):
        create(source, tmp_path / "b", Silent(), with_base=True)
    base = tmp_path / "cache" / "bases" / "tiny-llama"
    base.mkdir(parents=True)
    (base / SPEC_FILE).write_bytes(msgspec.json.encode(build_tiny_spec()))
    (tmp_path / "weights").write_bytes(b"weights")
    (base / "model.safetensors").symlink_to(tmp_path / "weights")
    create(source, tmp_path / "b", Silent(), with_base=True)
    restore(tmp_path / "b", tmp_path / "new", Silent())
    copied = tmp_path / "new" / "bases" / "tiny-llama" / "model.safetensors"
    assert (copied.is_symlink(), copied.read_bytes()) == (False, b"weights")


def _artifact(backup: Path) -> Path:
    return next(find_artifacts(backup / "objects"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "rotted": (lambda backup: _flip(_artifact(backup) / "files/adapter_model.safetensors"), {"rotted"}),
    "rotted-database": (lambda backup: _flip(backup / "loraplex.db"), {"rotted"}),
    "truncated": (lambda backup: os.truncate(_artifact(backup) / "files/adapter_model.safetensors", 99), {"truncated"}),
    "missing-file": (lambda backup: (_artifact(backup) / "files/README.md").unlink(), {"missing"}),
    "missing-adapter": (lambda backup: shutil.rmtree(_artifact(backup)), {"missing"}),
    "missing-secret": (lambda backup: (backup / "secrets/key.pepper").unlink(), {"missing"}),
    "extra": (lambda backup: (backup / "objects" / "more").write_text("x"), {"extra"}),
    "link": (lambda backup: (backup / "objects" / "more").symlink_to("/etc/passwd"), {"foreign"}),
    "link-to-folder": (lambda backup: (backup / "objects" / "more").symlink_to("/etc"), {"foreign"}),
    "fifo": (lambda backup: os.mkfifo(backup / "objects" / "more"), {"foreign"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_nothing_is_restored(backup: Path, tmp_path: Path, damage: str) -> None:
    do, kinds = DAMAGE[damage]
    do(backup)
    _, faults = verify(backup, Silent())
    assert {fault.kind for fault in faults} == kinds
    with pytest.raises(NotWholeError, match=faults[0].subject):
        restore(backup, tmp_path / "new", Silent())
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new.*"))


def _reseal(backup: Path, **changes: object) -> None:
    """Rewrite the manifest as somebody would who can write a seal."""
    manifest = msgspec.structs.replace(read_manifest(backup), **changes)
    (backup / "backup.json").write_bytes(encode_manifest(seal(manifest)))


def _adopt(backup: Path, path: Path) -> None:
    """Let the manifest say what is there."""
    name, content = str(path.relative_to(backup)), path.read_bytes()
    files = [file for file in read_manifest(backup).files if file.path != name]
    entry = type(files[0])(name, len(content), hashlib.sha256(content).hexdigest())
    _reseal(backup, files=(*files, entry))


def test_whole_files_of_another_adapter_are_found_by_the_digest(backup: Path) -> None:
    first, second = find_artifacts(backup / "objects")
    for name in ("manifest.json", "files/adapter_model.safetensors"):
        shutil.copyfile(first / name, second / name)
        _adopt(backup, second / name)
    manifest = msgspec.json.decode((second / "manifest.json").read_bytes())
    manifest["digest"] = f"sha256:{second.name}"
    (second / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    _adopt(backup, second / "manifest.json")
    _, faults = verify(backup, Silent())
    assert {fault.subject[:71] for fault in faults} == {f"sha256:{second.name}"}
    with contextlib.closing(sqlite3.connect(backup / "loraplex.db")) as connection:
        connection.execute("DROP TRIGGER guard_adapter_version_fixed")
        files = [{**file, "place": f"files/{file['name']}"} for file in manifest["files"]]
        connection.execute(
            "UPDATE adapter_version SET files = ? WHERE digest = ?", (json.dumps(files), f"sha256:{second.name}")
        )
        connection.commit()
    _adopt(backup, backup / "loraplex.db")
    _, faults = verify(backup, Silent())
    assert [(fault.kind, f"sha256:{first.name}" in fault.message) for fault in faults] == [("digest", True)]


def test_a_database_that_breaks_its_own_rules_is_found(backup: Path) -> None:
    with contextlib.closing(sqlite3.connect(backup / "loraplex.db")) as connection:
        connection.execute("DROP TRIGGER guard_adapter_version_delete")
        connection.execute("DELETE FROM adapter_version WHERE number = 2")
        connection.commit()
    _adopt(backup, backup / "loraplex.db")
    _, faults = verify(backup, Silent())
    assert [(fault.kind, "alias canary leads to version 2" in fault.message) for fault in faults] == [
        ("database", True)
    ]


HOSTILE_PATHS = ("../../evil", "/etc/passwd", "objects/../../evil", "secrets/other", "lock", "objects/sha256/aa/bb/x")


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_a_manifest_that_names_other_places_is_refused(backup: Path, tmp_path: Path, path: str) -> None:
    files = read_manifest(backup).files
    _reseal(backup, files=(*files, type(files[0])(path, 1, "0" * 64)))
    with pytest.raises(BackupError, match="names what no backup holds"):
        restore(backup, tmp_path / "new", Silent())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no backup"),
        (b"", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b'{"format": 1}', "is damaged"),
        (b'{"format": 2, "anything": []}', "upgrade it"),
    ],
)
def test_a_manifest_that_is_none_is_refused(backup: Path, content: bytes | None, message: str) -> None:
    (backup / "backup.json").unlink()
    if content is not None:
        (backup / "backup.json").write_bytes(content)
    with pytest.raises(BackupError, match=message):
        verify(backup, Silent())


def test_a_manifest_that_rotted_is_found_by_its_seal(backup: Path) -> None:
    text = (backup / "backup.json").read_text()
    (backup / "backup.json").write_text(text.replace('"num_artifacts": 2', '"num_artifacts": 3'))
    with pytest.raises(BackupError, match="seal"):
        verify(backup, Silent())


def test_a_bomb_does_not_fit_and_is_not_begun(backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(BackupError, match="MiB are needed"):
        restore(backup, tmp_path / "new", Silent())
    assert not (tmp_path / "new").exists()


def test_a_backup_that_does_not_fit_is_not_begun(
    platform: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(BackupError, match="MiB are needed"):
        create(build_source(platform), tmp_path / "b", Silent())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_left_alone(platform: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(BackupError, match="choose another"):
            restore(made, place, Silent())
        with pytest.raises(BackupError, match="choose another"):
            create(build_source(platform), place, Silent())
    assert digest_of_tree(tmp_path).keys() == {"full/mine", "file"}
    (tmp_path / "empty").mkdir()
    restore(made, tmp_path / "empty", Silent())
    assert (tmp_path / "empty" / "loraplex.db").exists()


def test_postgres_and_buckets_are_sent_to_the_page_that_knows(platform: Path, tmp_path: Path) -> None:
    for settings in (
        {"database_url": "postgresql+psycopg://me:secret@db/loraplex"},
        {"object_store_url": "s3://bucket/prefix"},
    ):
        with pytest.raises(UnsupportedPlaceError, match="loraplex backup verify") as caught:
            create(build_source(platform, **settings), tmp_path / "b", Silent())
        assert "secret" not in caught.value.message
    with pytest.raises(BackupError, match="--data-dir"):
        create(build_source(tmp_path / "nowhere"), tmp_path / "b", Silent())
    assert list(tmp_path.iterdir()) == []


def test_what_is_damaged_in_the_platform_is_named_and_left_out(platform: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(platform, tmp_path / "data"))
    damaged = _artifact(data)
    _flip(damaged / "files" / "adapter_model.safetensors")
    manifest = create(build_source(data), tmp_path / "b", Silent())
    assert [fault.subject[:71] for fault in manifest.damaged] == [f"sha256:{damaged.name}"]
    assert manifest.num_artifacts == 1
    assert verify(tmp_path / "b", Silent())[1] == []
    restore(tmp_path / "b", tmp_path / "new", Silent())
    assert [path.name for path in find_artifacts(tmp_path / "new" / "objects")] != [damaged.name]


def _downgrade(database: Path, revision: str) -> None:
    config = migration._config()
    engine = sa.create_engine(f"sqlite:///{database}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
        connection.commit()


@pytest.mark.parametrize("revision", ["0006_rules_in_the_database", "0002_gateway"])
def test_an_older_platform_is_backed_up_as_it_is_and_upgraded_when_it_is_restored(
    platform: Path, tmp_path: Path, revision: str
) -> None:
    data = Path(shutil.copytree(platform, tmp_path / "data"))
    _downgrade(data / "loraplex.db", revision)
    manifest = create(build_source(data), tmp_path / "b", Silent())
    assert (manifest.revision, verify(tmp_path / "b", Silent())[1]) == (revision, [])
    restore(tmp_path / "b", tmp_path / "new", Silent())
    found = audit(build_source(tmp_path / "new").database_url, f"file://{tmp_path}/new/objects", None, Silent())
    assert (found.faults, found.num_artifacts) == ([], 2)
    assert found.revision != revision
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(["loraplex.db", "objects", *SECRETS])


def test_a_newer_backup_is_refused(backup: Path, tmp_path: Path) -> None:
    _reseal(backup, revision="0099_future", made_by="9.0.0")
    for act in (lambda: verify(backup, Silent()), lambda: restore(backup, tmp_path / "new", Silent())):
        with pytest.raises(NewerError, match=r"9\.0\.0"):
            act()
    assert not (tmp_path / "new").exists()


def test_what_a_killed_one_left_goes_with_the_next(platform: Path, made: Path, tmp_path: Path) -> None:
    left = tmp_path / ".b.partial-0123"
    left.mkdir()
    (left / "loraplex.db").write_text("half")
    create(build_source(platform), tmp_path / "b", Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_manifest_reads_back_as_it_was(made: Path) -> None:
    manifest = read_manifest(made)
    assert isinstance(manifest, BackupManifest)
    assert encode_manifest(manifest) == (made / "backup.json").read_bytes()
