"""Adapters counted from the headers of their files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loraplex.errors import InvalidRequestError
from loraplex.plan.adapter_folder import read_adapter_folder
from loraplex.plan.planner import build_plan
from loraplex.plan.spec import PlanSpec
from support import tiny_llama_config, write_adapter, write_base


def test_adapters_of_one_form_are_counted_together_with_the_values_that_the_formula_gives(tmp_path: Path) -> None:
    config = tiny_llama_config()
    base = write_base(tmp_path / "base", config)
    for name, rank in (("a", 4), ("b", 4), ("c", 8)):
        write_adapter(tmp_path / "adapters" / name, base, rank=rank, targets=("q_proj", "v_proj"))
    groups = read_adapter_folder(tmp_path / "adapters")
    assert [(group.count, group.rank, tuple(group.modules)) for group in groups] == [
        (2, 4, ("q_proj", "v_proj")),
        (1, 8, ("q_proj", "v_proj")),
    ]
    counted = build_plan(PlanSpec(config=config, adapters=groups)).adapters
    by_formula = [msgspec.structs.replace(group, num_parameters=None) for group in groups]
    told = build_plan(PlanSpec(config=config, adapters=by_formula)).adapters
    assert [group.num_parameters for group in counted] == [group.num_parameters for group in told]
    assert counted[0].layer_parameters is None


def test_folder_of_one_adapter_is_one(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tiny_llama_config())
    write_adapter(tmp_path / "one", base, rank=2)
    assert [group.count for group in read_adapter_folder(tmp_path / "one")] == [1]


def test_folder_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors"):
        read_adapter_folder(tmp_path)


def test_file_that_is_no_safetensors_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(InvalidRequestError, match=str(tmp_path)):
        read_adapter_folder(tmp_path)
