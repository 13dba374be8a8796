from __future__ import annotations

from pathlib import Path

import pytest

from loraplex_registry.peft.check import check_names
from loraplex_registry.peft.file_rule import MAX_CONFIG_BYTES, MAX_TEMPLATE_BYTES, judge_sizes
from loraplex_registry.peft.findings import Findings

REQUIRED = ["adapter_config.json", "adapter_model.safetensors"]


def failed(names: list[str]) -> list[tuple[str, str]]:
    return [(check.name, check.subject) for check in check_names(names) if check.verdict == "fail"]


def test_a_folder_as_peft_and_trainers_write_it_passes() -> None:
    extra = ["README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    assert failed([*REQUIRED, *extra, "added_tokens.json", "vocab.json", "merges.txt"]) == []
    assert [check.name for check in check_names(REQUIRED)] == ["file_name", "file_set", "pickle"]


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.json",
        "C:\\x",
        "adapter_config.json\0.png",
        "/etc/passwd",
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "é.json",
        "x" * 300,
        "a..b",
        "tokenizer.json ",
        "\ud83d",
    ],
)
def test_names_that_are_not_plain_are_refused(name: str) -> None:
    assert failed([*REQUIRED, name]) == [("file_name", "files")]


@pytest.mark.parametrize("name", ["optimizer.json", "adapter_model_part_aa", "Adapter_config.json", "x.tar", "merges"])
def test_files_that_do_not_belong_to_an_adapter_are_refused(name: str) -> None:
    assert failed([*REQUIRED, name]) == [("file_set", name)]


@pytest.mark.parametrize("name", ["adapter_model.bin", "x.pt", "x.pth", "x.pkl", "OPTIMIZER.BIN", "a.ckpt"])
def test_pickles_are_refused_by_name_also_beside_safetensors(name: str) -> None:
    assert failed([*REQUIRED, name]) == [("pickle", name)]


def test_missing_doubled_and_too_many_files_are_refused() -> None:
    assert failed(["README.md"]) == [("file_set", name) for name in REQUIRED]
    assert failed([*REQUIRED, "README.md", "README.md"]) == [("file_set", "README.md")]
    assert failed([*REQUIRED, *(f"tokenizer_{n}.json" for n in range(15))]) == [("file_set", "files")]


@pytest.mark.parametrize(
    ("name", "limit"), [("adapter_config.json", MAX_CONFIG_BYTES), ("chat_template.jinja", MAX_TEMPLATE_BYTES)]
)
def test_small_files_have_small_limits(tmp_path: Path, name: str, limit: int) -> None:
    path = tmp_path / name
    for size, verdict in ((limit, "pass"), (limit + 1, "fail")):
        path.write_bytes(bytes(size))
        findings = Findings()
        judge_sizes({name: path}, findings)
        assert [(check.name, check.verdict) for check in findings.checks()] == [("file_size", verdict)]
