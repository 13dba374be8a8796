"""The digest of a model's files: what it covers, and that a pulled base keeps it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from loraplex_engine.bases.folder import load_marker, write_marker
from loraplex_engine.bases.manifest import build_manifest, digest_manifest, digest_model
from loraplex_engine.bases.pull import pull
from support import tiny_llama_config, write_base
from support_models import shard


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_base(tmp_path / "tiny", tiny_llama_config())


def test_the_digest_is_that_of_names_sizes_and_hashes(source: Path) -> None:
    names = [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    files = [
        [name, (source / name).stat().st_size, hashlib.sha256((source / name).read_bytes()).hexdigest()]
        for name in names
    ]
    text = json.dumps({"files": files, "v": 1}, separators=(",", ":"))
    assert digest_model(source) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_another_byte_in_any_file_is_another_digest(source: Path, name: str) -> None:
    before = digest_model(source)
    with (source / name).open("ab") as file:
        file.write(b" ")
    assert digest_model(source) != before


def test_files_that_are_not_served_are_outside(source: Path, tmp_path: Path) -> None:
    before = digest_model(source)
    (source / "README.md").write_text("hello")
    assert digest_model(source) == before
    entries = build_manifest(shard(source, tmp_path / "sharded"))
    assert "model.safetensors.index.json" in {name for name, _, _ in entries}
    assert digest_manifest(entries[::-1]) == digest_manifest(entries) != before


def test_a_pulled_base_keeps_the_digest_of_its_source_and_an_older_one_gets_it(source: Path, tmp_path: Path) -> None:
    folder = pull(str(source), tmp_path / "cache")
    marker = load_marker(folder)
    assert marker.digest == digest_model(source)
    write_marker(folder, msgspec.structs.replace(marker, digest=""))
    assert pull(str(folder), tmp_path / "cache") == folder
    assert load_marker(folder) == marker
