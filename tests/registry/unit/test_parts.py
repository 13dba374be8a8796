"""Parts of large uploads: every store keeps the same promises."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from loraplex_registry.errors import ArtifactMissingError, InvalidRequestError
from loraplex_registry.storage.store import Part, PartPlace, Store

UPLOAD = "upl_" + "a" * 26
OTHER = "upl_" + "b" * 26


def part_of(content: bytes, file: int = 0, number: int = 0) -> Part:
    return Part(PartPlace(file, number), len(content), hashlib.sha256(content).hexdigest())


def write(store: Store, content: bytes, *place: int, upload: str = UPLOAD) -> Part:
    folder = store.create_staging()
    (folder / "part").write_bytes(content)
    part = part_of(content, *place)
    store.write(upload, part, folder / "part")
    (folder / "part").unlink()
    folder.rmdir()
    return part


def test_parts_become_one_file_in_the_order_given(any_store: Store, tmp_path: Path) -> None:
    last, first = write(any_store, b"world", 0, 11), write(any_store, b"hello ", 0, 2)
    write(any_store, b"of another file", 1, 0)
    assert any_store.list(UPLOAD) == {PartPlace(0, 2): 6, PartPlace(0, 11): 5, PartPlace(1, 0): 15}
    assert any_store.join(UPLOAD, [first, last], tmp_path / "whole") == hashlib.sha256(b"hello world").hexdigest()
    assert (tmp_path / "whole").read_bytes() == b"hello world"
    assert (tmp_path / "whole").stat().st_mode & 0o777 == 0o600


def test_a_part_that_comes_again_replaces_its_twin(any_store: Store, tmp_path: Path) -> None:
    write(any_store, b"old")
    new = write(any_store, b"newer")
    assert any_store.list(UPLOAD) == {PartPlace(0, 0): 5}
    any_store.join(UPLOAD, [new], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"newer"


def test_other_bytes_than_announced_are_no_part(any_store: Store, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"abd")
    for announced in (part_of(b"abc"), part_of(b"ab")):
        with pytest.raises(InvalidRequestError):
            any_store.write(UPLOAD, announced, tmp_path / "part")
    assert any_store.list(UPLOAD) == {}


def test_what_cannot_be_joined_is_said(any_store: Store, tmp_path: Path) -> None:
    written = write(any_store, b"there")
    with pytest.raises(ArtifactMissingError):
        any_store.join(UPLOAD, [written, part_of(b"x", 0, 1)], tmp_path / "one")
    with pytest.raises(ArtifactMissingError):
        any_store.join(UPLOAD, [part_of(b"three")], tmp_path / "two")
    with pytest.raises(ArtifactMissingError):
        any_store.join(OTHER, [written], tmp_path / "three")


def test_uploads_are_listed_until_dropped(any_store: Store) -> None:
    write(any_store, b"1")
    write(any_store, b"2", upload=OTHER)
    assert [upload for upload, age_s in any_store.list_uploads() if age_s < 60] == [UPLOAD, OTHER]
    for _ in range(2):
        any_store.drop(UPLOAD)
    assert any_store.list(UPLOAD) == {}
    assert [upload for upload, _ in any_store.list_uploads()] == [OTHER]


def test_sweeping_staging_leaves_parts(any_store: Store) -> None:
    write(any_store, b"1")
    any_store.sweep_staging(-1)
    assert any_store.list(UPLOAD) == {PartPlace(0, 0): 1}
