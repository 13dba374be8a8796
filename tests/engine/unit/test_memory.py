"""What an engine needs, foreseen: the size of its KV pool, and the sentence when it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.errors import ConfigError, StartupError
from loraplex_engine.kv.reservation import Reservation
from loraplex_engine.loop.machine import MachineMemory
from loraplex_engine.loop.memory import MemoryPlan, check_share, choose_kv_bytes, choose_num_blocks, plan_memory
from loraplex_engine.loop.profile import limit_rows
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import expected_tensors
from support import tiny_llama_config

GIB, MIB = 1 << 30, 1 << 20
PLAN = MemoryPlan(
    weight_bytes=400 * MIB,
    head_bytes=80 * MIB,
    embedding_bytes=0,
    step_bytes=300 * MIB,
    slot_bytes=300 * MIB,
    host_bytes=GIB,
    kv_bytes=2 * GIB,
    kv_tokens=1000,
)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(base="", cache_dir="", **settings)


def test_pool_holds_no_more_blocks_than_all_sequences_could_use() -> None:
    assert choose_num_blocks(config(max_num_seqs=2), 1 << 30, 1024, 100) == 2 * 7


def test_pool_is_as_large_as_its_bytes_allow() -> None:
    assert choose_num_blocks(config(), 10_500, 1000, 8192) == 10


def test_pool_without_one_block_does_not_start_and_names_the_lever() -> None:
    with pytest.raises(StartupError, match="--kv-cache-memory-bytes"):
        choose_num_blocks(config(), 999, 1000, 8192)


def test_without_a_flag_the_pool_is_bounded_twice() -> None:
    assert choose_kv_bytes(config(), PLAN, MachineMemory(100 * GIB, GIB), 0) == 2 * GIB
    assert choose_kv_bytes(config(), PLAN, MachineMemory(5 * GIB, GIB), 0) == GIB


def test_bytes_are_taken_at_their_word() -> None:
    asked = config(kv_cache_memory_bytes=7 * GIB)
    assert choose_kv_bytes(asked, PLAN, MachineMemory(5 * GIB, GIB), 0) == 7 * GIB


def test_a_share_gives_the_pool_what_process_step_and_adapters_leave() -> None:
    asked = config(gpu_memory_utilization=0.5)
    left = choose_kv_bytes(asked, PLAN, MachineMemory(20 * GIB, GIB), 2 * GIB)
    assert left == 10 * GIB - 2 * GIB - PLAN.step_bytes - PLAN.host_bytes


def test_a_share_that_is_used_already_does_not_start_and_says_by_what() -> None:
    asked = config(gpu_memory_utilization=0.1)
    with pytest.raises(
        StartupError, match=r"0\.1 allows 1\.00 GiB.* use 2\.00 GiB.*300\.0 MiB.*to at least 0\.33, or.*--max-cpu-loras"
    ):
        choose_kv_bytes(asked, PLAN, MachineMemory(10 * GIB, GIB), 2 * GIB)


def test_a_share_below_weights_and_adapters_is_refused_beforehand_with_one_that_does() -> None:
    machine = MachineMemory(40 * GIB, GIB)
    with pytest.raises(
        StartupError, match=r"0\.01 allows 409\.6 MiB of 40\.00 GiB.*raise it to at least 0\.06, or"
    ) as refused:
        check_share(config(gpu_memory_utilization=0.01), PLAN, machine, MIB)
    assert "weights need 480.0 MiB and adapters in host memory up to 1.00 GiB" in str(refused.value)
    check_share(config(gpu_memory_utilization=0.06), PLAN, machine, MIB)
    with pytest.raises(StartupError, match=r"up to 1\.00 GiB: lower --max-cpu-loras"):
        check_share(config(gpu_memory_utilization=0.9), PLAN, MachineMemory(GIB, GIB), MIB)


def test_share_and_bytes_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        check_config(config(gpu_memory_utilization=0.9, kv_cache_memory_bytes=GIB))


@pytest.mark.parametrize("share", [0.0, 1.01, -1.0])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        check_config(config(gpu_memory_utilization=share))


def test_what_fits_starts_and_what_does_not_names_figures_and_levers() -> None:
    needed = (400 + 80 + 300 + 300) * MIB + 2 * GIB
    PLAN.check_fits(needed)
    with pytest.raises(StartupError) as refused:
        PLAN.check_fits(needed - 1)
    for words in (
        "needs 3.05 GiB (weights 480.0 MiB, KV cache 2.00 GiB, a step 300.0 MiB, adapter slots 300.0 MiB)",
        "but 3.05 GiB of memory are free",
        "lower --kv-cache-memory-bytes",
        "--max-num-batched-tokens",
        "--max-loras",
    ):
        assert words in str(refused.value)


def test_weights_are_foreseen_to_the_byte() -> None:
    model = ModelConfig.from_hf(tiny_llama_config())
    matrices = {name: shape for name, shape in expected_tensors(model).items() if len(shape) == 2}
    by_name = {name: shape[0] * shape[1] * 2 for name, shape in matrices.items()}
    head, embedding = by_name.pop("lm_head.weight"), by_name.pop("model.embed_tokens.weight")
    plan = plan_memory(config(), model, 2, is_mapped=False)
    assert (plan.weight_bytes, plan.head_bytes, plan.embedding_bytes) == (sum(by_name.values()), head, embedding)
    assert plan_memory(config(), model, 2, is_mapped=True).embedding_bytes == 0


def test_slots_are_foreseen_at_the_highest_rank() -> None:
    model = ModelConfig.from_hf(tiny_llama_config())
    linears = [shape for name, shape in expected_tensors(model).items() if "_proj.weight" in name]
    one = sum(8 * (rows + columns) * 4 for rows, columns in linears)
    plan = plan_memory(config(max_loras=3, max_lora_rank=8), model, 4, is_mapped=True)
    assert (plan.slot_bytes, plan.host_bytes) == (3 * one, 12 * one)


def test_the_table_has_every_use_and_the_tokens() -> None:
    lines = list(replace(PLAN, kv_tokens=4321).to_lines(3 * GIB, MachineMemory(16 * GIB, 9 * GIB)))
    assert any("KV cache" in line and "2.00 GiB" in line and "4321 tokens" in line for line in lines)
    assert any("embedding" in line and "the file's pages" in line for line in lines)
    assert any("this process now" in line and "3.00 GiB  with Python and PyTorch" in line for line in lines)
    assert any("the machine" in line and "16.00 GiB" in line and "9.00 GiB free" in line for line in lines)
    assert all(line.startswith("memory: ") for line in lines)


def test_the_table_adds_up() -> None:
    plan = replace(PLAN, weight_bytes=GIB, head_bytes=GIB, step_bytes=GIB)
    rows = [line.removeprefix("memory: ") for line in plan.to_lines(0, MachineMemory(1, 1))]
    sizes = {row[:24].strip(): row[24:].split()[0] for row in rows}
    assert (sizes["= without adapters"], sizes["+ adapters, at most"], sizes["= at most"]) == ("5.00", "1.00", "6.00")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 400}, [100] * 4),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 4000}, [256] * 4),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, [1] * 3),
    ],
)
def test_a_profile_is_a_step_at_the_limits(settings: dict[str, int], rows: list[int]) -> None:
    assert limit_rows(config(**settings), 256) == rows


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
@pytest.mark.parametrize("num_bytes", [1, 200 * MIB + 12345])
def test_reserved_memory_is_zero_and_there(num_bytes: int) -> None:
    def resident() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

    before = resident()
    memory = Reservation(num_bytes).wait()
    assert len(memory) >= num_bytes
    assert resident() - before >= num_bytes - 4 * MIB
    assert memory[:4096].strip(b"\0") == memory[-4096:].strip(b"\0") == b""
