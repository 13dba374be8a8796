"""The digest of a whole model as files: what a full fine-tune is registered under, and what its replicas report.

`sha256:` over canonical JSON of the manifest `{"v": 1, "files": [[name, size in bytes, sha256 in hex], ...]}`, sorted
by name, of exactly the files that are served: config, tokenizer, chat template, weights. Another byte in any of them
is another digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loraplex_engine.bases.source import SMALL_FILES
from loraplex_engine.weights.index import SHARD_INDEX, weight_files

ManifestEntry = tuple[str, int, str]


def build_manifest(folder: Path) -> list[ManifestEntry]:
    """Return name, size and sha256 of every file of the model in `folder`, sorted by name; reads them all.

    Raises:
        BaseUnsupportedError: It has no weights, or not all of them.
    """
    small = [folder / name for name in (*SMALL_FILES, SHARD_INDEX) if (folder / name).is_file()]
    return [_describe(path) for path in sorted([*small, *weight_files(folder)], key=lambda path: path.name)]


def digest_manifest(manifest: list[ManifestEntry]) -> str:
    """Return the digest of a manifest."""
    content = {"v": 1, "files": sorted(manifest)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def digest_model(folder: Path) -> str:
    """Return the digest of the model in `folder`; reads all of it."""
    return digest_manifest(build_manifest(folder))


def _describe(path: Path) -> ManifestEntry:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return path.name, path.stat().st_size, found
