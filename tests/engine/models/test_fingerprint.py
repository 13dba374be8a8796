"""What a base is, independent of how and where it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.bases.fingerprint import build_spec, compute_fingerprint, digest_tokenizer
from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.config import ModelConfig
from loraplex_registry.peft.spec import BaseSpec
from support import tiny_llama_config, write_base, write_json


def spec_of(folder: Path) -> BaseSpec:
    return build_spec(folder, "base", ())[0]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", tiny_llama_config())


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def test_digests_are_the_same_in_another_process(base: Path, run_python: Callable[[str], str]) -> None:
    program = (
        "from pathlib import Path; from loraplex_engine.bases.fingerprint import build_spec\n"
        f"spec, hashes = build_spec(Path({str(base)!r}), 'base', ())\n"
        "print(spec.fingerprint, spec.weights_digest, list(hashes) == sorted(hashes))"
    )
    spec = spec_of(base)
    assert run_python(program).split() == [spec.fingerprint, spec.weights_digest, "True"]


def test_digest_is_pinned() -> None:
    """A change here means that every base in every registry becomes another one: bump the version in the digest."""
    fingerprint = compute_fingerprint(ModelConfig.from_hf(tiny_llama_config()), "sha256:" + "0" * 64)
    assert fingerprint == "sha256:27c9edf71af89e03d24ad032706984c10bf2753fea9a5e72d63b1562396f38ac"


def test_spelling_does_not_matter(base: Path) -> None:
    before = spec_of(base)

    def respell_config(config: dict[str, Any]) -> None:
        theta = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        config["rms_norm_eps"] = 9.999999747378752e-06
        config["transformers_version"] = "5.24.0"

    def respell_tokenizer(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        for token in tokenizer["added_tokens"]:
            tokenizer["model"]["vocab"].pop(token["content"])

    change_json(base / "config.json", respell_config)
    change_json(base / "tokenizer.json", respell_tokenizer)
    assert spec_of(base) == before


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda config: config.update(rms_norm_eps=1e-6)),
        ("config.json", lambda config: config.update(rope_theta=20000.0)),
        ("tokenizer.json", lambda tokenizer: tokenizer["model"]["merges"].reverse()),
        ("tokenizer.json", lambda tokenizer: tokenizer["added_tokens"][0].update(special=False)),
        ("tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(new=330)),
    ],
)
def test_what_changes_the_meaning_changes_the_fingerprint(
    base: Path, file: str, change: Callable[[dict[str, Any]], None]
) -> None:
    before = spec_of(base)
    change_json(base / file, change)
    after = spec_of(base)
    assert after.fingerprint != before.fingerprint
    assert after.weights_digest == before.weights_digest


def test_another_precision_is_the_same_base_with_other_weights(base: Path, tmp_path: Path) -> None:
    rounded = write_base(tmp_path / "rounded", tiny_llama_config(), dtype="bfloat16")
    one, other = spec_of(base), spec_of(rounded)
    assert one.fingerprint == other.fingerprint
    assert one.weights_digest != other.weights_digest


def test_other_weights_have_another_weights_digest(base: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", tiny_llama_config(), seed=8)
    assert spec_of(other).weights_digest != spec_of(base).weights_digest


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(base: Path) -> None:
    change_json(base / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(new=331))
    with pytest.raises(BaseUnsupportedError, match="331"):
        spec_of(base)


def test_a_folder_without_tokenizer_is_refused(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    with pytest.raises(BaseUnsupportedError, match=r"tokenizer\.json"):
        spec_of(base)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"model": []}',
        b'{"model": {"vocab": [1]}}',
        b'{"model": {"vocab": {"a": "b", "c": 1}}}',
        b'{"model": {"vocab": {"a": 0}, "merges": [1]}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
        b'{"model": {"vocab": {"\\ud800": 0}}}',
    ],
    ids=range(9),
)
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BaseUnsupportedError, match=r"tokenizer\.json is not a tokenizer"):
        digest_tokenizer(tmp_path, 64)
