"""A stored file whose bytes have changed is never sent whole."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from loraplex_registry.api.sending import send_file
from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.storage.folder import FolderStore
from loraplex_registry.storage.verified import PIECE_BYTES
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.digest import artifact_path

DIGEST = "sha256:" + "cd" * 32


def put(root: Path, content: bytes) -> tuple[FolderStore, ManifestFile, Path]:
    """Store one file; a copy of what it is made from lies elsewhere."""
    store = FolderStore(root)
    source = store.create_staging() / "weights"
    source.write_bytes(content)
    file = ManifestFile("weights", len(content), hashlib.sha256(content).hexdigest())
    store.put(Manifest(digest=DIGEST, base_fingerprint="f", files=(file,), config={}), {"weights": source})
    return store, file, root / artifact_path(DIGEST) / "files" / "weights"


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_whole_files_arrive_byte_for_byte(tmp_path: Path, size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    store, file, _ = put(tmp_path, content[:size])
    answer = await send_file(store, DIGEST, "files/weights", file)
    assert b"".join([piece async for piece in answer.iterator]) == content[:size]  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
async def test_a_small_damaged_file_is_an_error(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store, file, path = put(tmp_path, b"some weights")
    path.write_bytes({"flip": b"some wEights", "cut": b"some", "grow": b"some weights."}[damage])
    with caplog.at_level(logging.ERROR), pytest.raises(StoreUnavailableError, match="damaged"):
        await send_file(store, DIGEST, "files/weights", file)
    assert DIGEST in caplog.text


async def test_a_large_damaged_file_breaks_before_its_end(tmp_path: Path) -> None:
    content = b"\0" * (3 * PIECE_BYTES)
    store, file, path = put(tmp_path, content)
    path.write_bytes(b"\1" + content[1:])
    answer = await send_file(store, DIGEST, "files/weights", file)
    pieces = aiter(answer.iterator)  # type: ignore[arg-type]
    assert [len(await anext(pieces)) for _ in range(2)] == [PIECE_BYTES, PIECE_BYTES]
    with pytest.raises(StoreUnavailableError, match="damaged"):
        await anext(pieces)


async def test_who_verifies_by_himself_gets_a_damaged_file_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, file, path = put(tmp_path, b"some weights")
    path.write_bytes(b"some wEights")
    with caplog.at_level(logging.ERROR):
        answer = await send_file(store, DIGEST, "files/weights", file, is_strict=False)
        assert b"".join([piece async for piece in answer.iterator]) == b"some wEights"  # type: ignore[misc, union-attr]
    assert DIGEST in caplog.text
