from __future__ import annotations

import pytest
import torch

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError, StartupError
from loraplex_engine.loop.assembly import fit_max_model_len
from loraplex_engine.loop.base import choose_dtype, choose_max_model_len


def config(**settings: int) -> EngineConfig:
    return EngineConfig(base="", cache_dir="", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("flag", "length"), [(0, 512), (100, 100), (512, 512)])
def test_context_is_the_base_s_unless_the_flag_asks_for_less(flag: int, length: int) -> None:
    assert choose_max_model_len(config(max_model_len=flag), 512) == length


def test_context_above_the_base_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        choose_max_model_len(config(max_model_len=513), 512)


def test_context_shrinks_to_what_the_pool_holds_unless_the_flag_asked_for_more() -> None:
    assert fit_max_model_len(config(), 512, 160) == 160
    assert fit_max_model_len(config(max_model_len=160), 160, 160) == 160
    with pytest.raises(StartupError, match="holds 160 tokens"):
        fit_max_model_len(config(max_model_len=161), 161, 160)


def test_dtype_by_name_is_taken_at_its_word() -> None:
    assert choose_dtype("float32") is torch.float32
    assert choose_dtype("bfloat16") is torch.bfloat16
