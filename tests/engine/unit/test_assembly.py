from __future__ import annotations

import pytest
import torch

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError, StartupError
from loraplex_engine.loop.assembly import choose_dtype, choose_max_model_len, choose_num_blocks, fit_max_model_len


def config(**settings: int) -> EngineConfig:
    return EngineConfig(base="", cache_dir="", **settings)  # type: ignore[arg-type]


def test_pool_holds_no_more_blocks_than_all_sequences_could_use() -> None:
    assert choose_num_blocks(config(max_num_seqs=2, kv_cache_memory_bytes=1 << 30), 1024, 100) == 2 * 7


def test_pool_is_as_large_as_its_bytes_allow() -> None:
    assert choose_num_blocks(config(kv_cache_memory_bytes=10_500), 1000, 8192) == 10


def test_pool_without_one_block_does_not_start_and_names_the_lever() -> None:
    with pytest.raises(StartupError, match="--kv-cache-memory-bytes"):
        choose_num_blocks(config(kv_cache_memory_bytes=999), 1000, 8192)


@pytest.mark.parametrize(("flag", "length"), [(0, 512), (100, 100), (512, 512)])
def test_context_is_the_base_s_unless_the_flag_asks_for_less(flag: int, length: int) -> None:
    assert choose_max_model_len(config(max_model_len=flag), 512) == length


def test_context_above_the_base_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        choose_max_model_len(config(max_model_len=513), 512)


def test_context_shrinks_to_what_the_pool_holds_unless_the_flag_asked_for_more() -> None:
    assert fit_max_model_len(config(), 512, 10) == 160
    assert fit_max_model_len(config(max_model_len=160), 160, 10) == 160
    with pytest.raises(StartupError, match="holds 160 tokens"):
        fit_max_model_len(config(max_model_len=161), 161, 10)


def test_dtype_by_name_is_taken_at_its_word() -> None:
    assert choose_dtype("float32") is torch.float32
    assert choose_dtype("bfloat16") is torch.bfloat16
