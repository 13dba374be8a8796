"""What an engine is built from: context, dtype, the pool's length, and where they come from."""

from __future__ import annotations

import logging

import pytest

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError, StartupError
from loraplex_engine.loop.base import choose_dtype, choose_max_model_len
from loraplex_engine.loop.preparation import check_length


def config(**settings: int) -> EngineConfig:
    return EngineConfig(base="", cache_dir="", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("flag", "length"), [(0, 512), (100, 100), (512, 512)])
def test_context_is_the_base_s_unless_the_flag_asks_for_less(flag: int, length: int) -> None:
    assert choose_max_model_len(config(max_model_len=flag), 512) == length


def test_context_above_the_base_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        choose_max_model_len(config(max_model_len=513), 512)


def test_a_pool_that_is_shorter_than_the_flag_does_not_start() -> None:
    check_length(config(max_model_len=160), 512, 160)
    with pytest.raises(StartupError, match="holds 160 tokens: raise --kv-cache-memory-bytes"):
        check_length(config(max_model_len=161), 512, 160)


def test_a_pool_that_is_shorter_than_the_base_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_length(config(), 512, 160)
    assert "at most that many (base: 512)" in caplog.text


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_dtype_by_name_is_taken_at_its_word(name: str) -> None:
    assert choose_dtype(name) == name
