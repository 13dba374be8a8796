"""Object stores: the folder and its twin in memory keep the same promises."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex_registry.errors import ArtifactMissingError, SettingError, StoreUnavailableError
from loraplex_registry.storage.folder import FolderStore
from loraplex_registry.storage.shelf import FolderShelf
from loraplex_registry.storage.store import Store, create_store
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.digest import artifact_path

DIGEST = "sha256:" + "ab" * 32


def stage(store: Store, digest: str = DIGEST, **contents: bytes) -> tuple[Manifest, dict[str, Path]]:
    folder = store.create_staging()
    files = {}
    for name, content in contents.items():
        files[name] = folder / name
        files[name].write_bytes(content)
    described = tuple(
        ManifestFile(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    )
    return Manifest(digest=digest, base_fingerprint="f", files=described, config={"r": 8}), files


def test_what_is_put_can_be_opened(any_store: Store) -> None:
    manifest, files = stage(any_store, config=b"{}", weights=b"\0" * 100)
    assert any_store.find_manifest(DIGEST) is None
    assert any_store.put(manifest, files) == {"config": "files/config", "weights": "files/weights"}
    assert any_store.find_manifest(DIGEST) == manifest
    with any_store.open(DIGEST, "files/weights") as opened:
        assert opened.read() == b"\0" * 100
    assert [digest for digest, _ in any_store.list_artifacts()] == [DIGEST]
    age_s = any_store.find_age_s(DIGEST)
    assert age_s is not None
    assert age_s < 60
    assert all(path.exists() for path in files.values())


def test_first_files_stay_and_different_ones_are_kept_beside(any_store: Store) -> None:
    any_store.put(*stage(any_store, readme=b"first", weights=b"same"))
    places = any_store.put(*stage(any_store, readme=b"second", weights=b"same", extra=b"more"))
    assert places["weights"] == "files/weights"
    with any_store.open(DIGEST, places["readme"]) as second, any_store.open(DIGEST, "files/readme") as first:
        assert (first.read(), second.read()) == (b"first", b"second")
    with any_store.open(DIGEST, places["extra"]) as extra:
        assert extra.read() == b"more"
    assert [file.name for file in any_store.find_manifest(DIGEST).files] == ["readme", "weights"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content", [b"", b'{"digest":"\xff"}', b'{"x":' + b"[" * 100_000], ids=["cut", "bytes", "nested"]
)
def test_a_manifest_that_rotted_is_none(tmp_path: Path, content: bytes) -> None:
    store = FolderStore(tmp_path)
    store.put(*stage(store, weights=b"x"))
    (tmp_path / artifact_path(DIGEST) / "manifest.json").write_bytes(content)
    assert store.find_manifest(DIGEST) is None
    assert FolderShelf(tmp_path).find_manifest(DIGEST) is None


@pytest.mark.parametrize("call", ["os.fsync", "os.link"])
def test_a_put_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FolderStore(tmp_path / "objects")
    store.put(*stage(store, readme=b"first"))
    other = DIGEST.replace("ab", "cd")
    for manifest, files in (stage(store, other, readme=b"x"), stage(store, readme=b"second")):
        with monkeypatch.context() as patch:
            patch.setattr(f"loraplex_registry.storage.folder.{call}", fail)
            with pytest.raises(StoreUnavailableError, match="No space"):
                store.put(manifest, files)
    assert list((store.root / "tmp").iterdir()) == []
    assert [digest for digest, _ in store.list_artifacts()] == [DIGEST]


def test_missing_things_are_errors_and_deletion_is_idempotent(any_store: Store) -> None:
    with pytest.raises(ArtifactMissingError):
        any_store.open(DIGEST, "files/config")
    any_store.put(*stage(any_store, config=b"{}"))
    with pytest.raises(ArtifactMissingError):
        any_store.open(DIGEST, "files/other")
    for _ in range(2):
        any_store.delete(DIGEST)
    assert any_store.find_manifest(DIGEST) is None
    assert any_store.find_age_s(DIGEST) is None
    assert list(any_store.list_artifacts()) == []


def test_an_open_file_outlives_its_deletion(any_store: Store) -> None:
    any_store.put(*stage(any_store, config=b"{}"))
    with any_store.open(DIGEST, "files/config") as opened:
        any_store.delete(DIGEST)
        assert opened.read() == b"{}"


def test_staging_is_swept_once_nothing_was_written_for_long(any_store: Store) -> None:
    old, young = any_store.create_staging(), any_store.create_staging()
    for folder in (old, young):
        (folder / "part").write_bytes(b"x")
        os.utime(folder, (0, 0))
    os.utime(old / "part", (0, 0))
    assert any_store.sweep_staging(60) == 1
    assert (old.exists(), young.exists()) == (False, True)


def test_concurrent_puts_of_one_digest_leave_one_whole_artifact(any_store: Store) -> None:
    staged = [stage(any_store, readme=f"{number}".encode(), weights=b"w" * 1000) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda args: any_store.put(*args), staged))
    for number, place in enumerate(places):
        with any_store.open(DIGEST, place["readme"]) as opened:
            assert opened.read() == f"{number}".encode()
    assert any_store.find_manifest(DIGEST) is not None


def test_folder_is_private_and_leaves_no_temporary_names(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "objects")
    store.put(*stage(store, config=b"{}"))
    store.put(*stage(store, config=b"{ }"))
    made = [path for path in store.root.rglob("*") if "receiving" not in path.parts and path.parent.name != "files"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o700}
    # Staged files are private before they come here; links keep their mode.
    assert stat.S_IMODE((store.root / artifact_path(DIGEST) / "manifest.json").stat().st_mode) == 0o600
    assert list((store.root / "tmp").iterdir()) == []


def test_damaged_artifact_is_no_artifact_and_is_replaced(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "objects")
    store.put(*stage(store, config=b"{}", weights=b"1234"))
    folder = store.root / artifact_path(DIGEST)
    for damage in (
        lambda: (folder / "manifest.json").write_bytes(b"{"),
        (folder / "manifest.json").unlink,
        lambda: (folder / "files" / "weights").write_bytes(b"123"),
    ):
        damage()
        assert store.find_manifest(DIGEST) is None
        store.put(*stage(store, config=b"{}", weights=b"1234"))
        assert store.find_manifest(DIGEST) is not None


def test_interrupted_put_is_no_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path / "objects")
    manifest, files = stage(store, config=b"{}")

    def die(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            store.put(manifest, files)
    assert store.find_manifest(DIGEST) is None
    assert store.put(manifest, files) == {"config": "files/config"}


@pytest.mark.parametrize("url", ["s3://b", "file://host/x", "file:///", "/tmp/x", "http://x/y"])
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(SettingError, match="LORAPLEX_OBJECT_STORE_URL"):
        create_store(url)


def test_url_of_a_folder_with_a_space(tmp_path: Path) -> None:
    create_store(f"file://{tmp_path}/my%20objects")
    assert (tmp_path / "my objects" / "sha256").is_dir()


def test_putting_again_puts_back_what_has_rotted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "objects")
    store.put(*stage(store, readme=b"first", weights=b"1234"))
    store.put(*stage(store, readme=b"other", weights=b"1234"))
    weights = store.root / artifact_path(DIGEST) / "files" / "weights"
    weights.unlink()
    weights.write_bytes(b"1235")
    places = store.put(*stage(store, readme=b"other", weights=b"1234"))
    assert weights.read_bytes() == b"1234"
    with store.open(DIGEST, "files/readme") as first, store.open(DIGEST, places["readme"]) as other:
        assert (first.read(), other.read()) == (b"first", b"other")
