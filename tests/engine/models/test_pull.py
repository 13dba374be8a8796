"""`pull` of local folders: what is copied, what is referred to, what a second pull does, and what a crash leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_engine.bases import pull as pull_module
from loraplex_engine.bases.folder import find_base, is_complete, list_bases, load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.errors import BaseUnavailableError, BaseUnsupportedError
from loraplex_engine.models.config import load_config
from loraplex_engine.weights.index import read_index
from support import tiny_llama_config, write_base
from support_models import shard


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_base(tmp_path / "src" / "My_Llama.v2", tiny_llama_config())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_folder_becomes_a_base_named_after_it(source: Path, cache: Path) -> None:
    folder = pull(str(source), cache)
    assert folder == cache / "bases" / "my-llama-v2"
    spec = load_spec(folder)
    assert (spec.name, spec.accepted_names) == ("my-llama-v2", ("My_Llama.v2",))
    assert spec.default_context == 512
    assert visible(folder) == [
        "base.json",
        "chat_template.jinja",
        "complete.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert load_config(folder).eos_token_ids == (2,)


def test_weights_are_referred_to_and_small_files_copied(source: Path, cache: Path) -> None:
    folder = pull(str(source), cache)
    assert (folder / "model.safetensors").resolve() == source / "model.safetensors"
    assert not (folder / "config.json").is_symlink()


def test_shards_become_a_base(source: Path, cache: Path, tmp_path: Path) -> None:
    folder = pull(str(shard(source, tmp_path / "sharded")), cache)
    assert len(read_index(folder)) == len(read_index(source))


def test_a_second_pull_changes_nothing(source: Path, cache: Path) -> None:
    first = pull(str(source), cache)
    before = {path.name: path.lstat().st_mtime_ns for path in first.iterdir()}
    assert pull(str(source), cache) == first
    assert {path.name: path.lstat().st_mtime_ns for path in first.iterdir()} == before


def test_weights_that_changed_are_noticed_and_pulled_again(source: Path, cache: Path) -> None:
    folder = pull(str(source), cache)
    before = load_spec(folder)
    write_base(source, tiny_llama_config(), seed=9)
    with pytest.raises(BaseUnavailableError, match="changed"):
        load_spec(folder)
    assert pull(str(source), cache) == folder
    after = load_spec(folder)
    assert after.fingerprint == before.fingerprint
    assert after.weights_digest != before.weights_digest


def test_weights_that_vanished_are_noticed(source: Path, cache: Path) -> None:
    folder = pull(str(source), cache)
    (source / "model.safetensors").unlink()
    with pytest.raises(BaseUnavailableError, match="vanished"):
        load_spec(folder)


def test_a_copied_base_is_served(source: Path, cache: Path, tmp_path: Path) -> None:
    folder = pull(str(source), cache)
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name, copy_function=shutil.copyfile)
    assert load_spec(copy) == load_spec(folder)


def test_a_cut_file_of_a_base_is_noticed(source: Path, cache: Path) -> None:
    folder = pull(str(source), cache)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BaseUnavailableError, match="changed"):
        load_spec(folder)


@pytest.mark.parametrize("name", ["base.json", "complete.json"])
@pytest.mark.parametrize(
    "content", [b"", b'{"name": "\xff"}', b'{"x":' + b"[" * 100_000], ids=["cut", "bytes", "nested"]
)
def test_a_base_that_rotted_is_said_so_pulled_again_and_hides_no_other(
    source: Path, cache: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = pull(str(source), cache)
    spec = load_spec(folder)
    other = write_base(tmp_path / "src" / "other", tiny_llama_config(), seed=5)
    there = pull(str(other), cache)
    (folder / name).write_bytes(content)
    with pytest.raises(BaseUnavailableError, match=f"{name} is damaged; pull the base again"):
        load_spec(folder)
    assert find_base(str(other), cache) == there
    assert pull(str(source), cache) == folder
    assert load_spec(folder) == spec


def test_the_same_weights_elsewhere_add_a_name_not_a_base(source: Path, cache: Path, tmp_path: Path) -> None:
    first = pull(str(source), cache)
    again = write_base(tmp_path / "copy" / "team-llama", tiny_llama_config())
    assert pull(str(again), cache) == first
    assert load_spec(first).accepted_names == ("My_Llama.v2", "team-llama")
    assert list_bases(cache) == [first]


def test_the_same_weights_with_another_template_are_another_base(source: Path, cache: Path, tmp_path: Path) -> None:
    first = pull(str(source), cache)
    again = write_base(tmp_path / "copy" / "team-llama", tiny_llama_config())
    (again / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    second = pull(str(again), cache)
    assert second != first
    assert load_spec(second).fingerprint == load_spec(first).fingerprint


def test_a_name_that_is_taken_by_other_weights_is_refused(source: Path, cache: Path, tmp_path: Path) -> None:
    first = pull(str(source), cache)
    before = load_spec(first)
    other = write_base(tmp_path / "other" / "my-llama-v2", tiny_llama_config(), seed=10)
    with pytest.raises(BaseUnavailableError, match="my-llama-v2 is taken"):
        pull(str(other), cache)
    assert load_spec(first) == before
    named = pull(str(other), cache, name="second")
    assert (named.name, load_spec(named).accepted_names) == ("second", ("my-llama-v2",))


def test_to_takes_the_base_folder_or_the_folder_around_it(source: Path, cache: Path, tmp_path: Path) -> None:
    around = pull(str(source), cache, to=tmp_path / "models")
    exact = pull(str(source), cache, to=tmp_path / "models" / "my-llama-v2")
    assert around == exact == tmp_path / "models" / "my-llama-v2"
    assert pull(str(around), cache) == around
    assert list_bases(cache) == []


def test_bases_are_found_by_path_name_and_spec(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(str(source), cache)
    monkeypatch.chdir(source.parent)
    for wanted in (str(folder), "my-llama-v2", str(source), source.name):
        assert find_base(wanted, cache) == folder
    for wanted in ("other", "My-Llama-v2", "/nowhere/my-llama-v2", "..."):
        assert find_base(wanted, cache) is None


@pytest.mark.parametrize("spec", ["no-such-thing", "./missing", "/missing/model.gguf", "a/b/c", ""])
def test_a_spec_that_is_nothing_says_what_it_may_be(spec: str, cache: Path) -> None:
    with pytest.raises(BaseUnavailableError, match="hub id"):
        pull(spec, cache)


def test_what_is_refused_leaves_no_base(source: Path, cache: Path) -> None:
    (source / "tokenizer.json").unlink()
    with pytest.raises(BaseUnsupportedError, match=r"tokenizer\.json"):
        pull(str(source), cache)
    assert list_bases(cache) == []


def test_a_folder_of_pickled_weights_is_refused(source: Path, cache: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(BaseUnsupportedError, match=r"model\.safetensors"):
        pull(str(source), cache)


def test_a_killed_pull_leaves_no_base_and_does_not_stop_the_next(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        pull(str(source), cache)
    monkeypatch.undo()
    assert list_bases(cache) == []
    assert (cache / "bases" / ".my-llama-v2.partial").exists()
    assert is_complete(pull(str(source), cache))
    assert not (cache / "bases" / ".my-llama-v2.partial").exists()


def test_pulls_at_once_make_one_base(source: Path, cache: Path) -> None:
    environment = {**os.environ, "LORAPLEX_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "loraplex_engine", "pull", str(source), "--json"]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(outputs) == 1
    assert visible(cache / "bases") == ["my-llama-v2"]
