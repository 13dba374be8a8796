"""`loraplex plan`: groups of adapters, where the model is found, JSON and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.cli.app import main
from loraplex.plan.preset import PRESETS
from support import tiny_llama_config, write_adapter, write_base, write_json

WORKED = ["plan", "--adapters", "40", "--rank", "16", "--modules", "q,k,v,o"]


def test_table_has_the_worked_figures_and_their_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORKED) == 0
    text = capsys.readouterr().out
    for part in ("425,984", "13,631,488", "27.26 MB = 26.0 MiB", "14.96 GiB", "598 GiB", "589x, quoted 560x"):
        assert part in text
    assert "40 x 16,060,522,496 B" in text
    assert "Slots against KV tokens on h100-80g" in text


def test_json_has_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["copies"]["adapters_bytes"] == 1_090_519_040
    assert found["adapters"][0]["num_parameters"] == 13_631_488


def test_groups_pair_in_order_and_a_single_rank_is_that_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--adapters", "3", "--adapters", "2", "--rank", "8", "--modules", "q,v", "--modules", "all"]
    main([*argv, "--json"])
    groups = json.loads(capsys.readouterr().out)["adapters"]
    assert [(group["count"], group["rank"], len(group["modules"])) for group in groups] == [(3, 8, 2), (2, 8, 7)]


@pytest.mark.parametrize(
    "argv",
    [
        ["--rank", "8"],
        ["--adapters", "1", "--adapters", "1", "--adapters", "1", "--rank", "8", "--rank", "16"],
        ["--dtype", "int3"],
        ["--gpu", "h900"],
        ["--model", "no-such-model"],
    ],
)
def test_wrong_question_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) != 0
    assert "error" in capsys.readouterr().err


def test_exit_code_says_that_nothing_fits() -> None:
    assert main(["plan", "--model", "llama-3.1-70b", "--gpu", "t4", "--json"]) == 1


def test_model_may_be_a_folder_and_adapters_those_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "my-base", tiny_llama_config())
    write_adapter(tmp_path / "adapters" / "one", base, rank=4)
    main(["plan", "--model", str(base), "--adapter-dir", str(tmp_path / "adapters"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "my-base"
    assert [(group["count"], group["rank"]) for group in found["adapters"]] == [(1, 4)]


def test_model_may_be_a_pulled_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(tmp_path))
    (tmp_path / "bases" / "house").mkdir(parents=True)
    write_json(tmp_path / "bases" / "house" / "config.json", PRESETS["qwen3-8b"])
    assert main(["plan", "--model", "house", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["num_parameters"] == 8_190_735_360


def test_model_of_the_hub_that_cannot_be_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "--model", "nobody/knows-this"]) == 1
    assert "cannot be fetched from the hub" in capsys.readouterr().err
