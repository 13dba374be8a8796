"""The first part of a start: what cannot run is refused before anything is allocated, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.bases.pull import pull
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import BaseUnavailableError, ConfigError, StartupError
from loraplex_engine.loop import preparation
from loraplex_engine.loop.machine import MachineMemory
from loraplex_engine.loop.preparation import prepare, settle
from support import tiny_llama_config, write_base

MIB = 1 << 20


@pytest.fixture
def base(tiny_llama: Path, tmp_path: Path) -> Path:
    return pull(str(tiny_llama), tmp_path / "bases")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_free(num_bytes: int, total_bytes: int = 100 * MIB) -> None:
        monkeypatch.setattr(preparation, "read_machine_memory", lambda: MachineMemory(total_bytes, num_bytes))

    return set_free


def config(base: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(base=str(base), cache_dir="", **{"dtype": "float32", **settings})


def test_the_pool_of_a_start_is_reserved_at_once(base: Path) -> None:
    prepared = prepare(config(base, kv_cache_memory_bytes=MIB, max_num_seqs=2))
    assert prepared.memory is not None
    assert len(prepared.memory.wait()) == prepared.plan.kv_bytes <= MIB
    assert prepared.plan.kv_tokens * prepared.base.block_bytes(16) == 16 * prepared.plan.kv_bytes


def test_what_the_machine_does_not_have_is_not_allocated(
    base: Path, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(preparation, "Reservation", reserved.append)
    needed = prepare(config(base, kv_cache_memory_bytes=8 * MIB)).plan
    free(needed.fixed_bytes + needed.kv_bytes + needed.step_bytes + needed.slot_bytes)
    prepare(config(base, kv_cache_memory_bytes=8 * MIB))
    assert reserved == [needed.kv_bytes] * 2
    free(needed.fixed_bytes + needed.kv_bytes + needed.step_bytes)
    with pytest.raises(StartupError, match=r"needs .*adapter slots .*are free: lower --kv-cache-memory-bytes"):
        prepare(config(base, kv_cache_memory_bytes=8 * MIB))
    assert len(reserved) == 2


def test_a_pool_that_nobody_could_fill_is_capped_and_told(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(config(base, kv_cache_memory_bytes=MIB, max_num_seqs=1024))
    assert not caplog.records
    plan = prepare(config(base, kv_cache_memory_bytes=64 * MIB, max_num_seqs=2, max_model_len=64)).plan
    (record,) = caplog.records
    assert plan.kv_tokens == 128
    assert "asks for 64.0 MiB, but 2 requests (--max-num-seqs) of 64 tokens (--max-model-len)" in record.getMessage()
    assert f"only {plan.kv_bytes / MIB:.1f} MiB" in record.getMessage()


def test_a_share_that_is_too_small_is_refused_before_weights_are_read(base: Path, free: Any) -> None:
    free(90 * MIB)
    with pytest.raises(StartupError, match=r"--gpu-memory-utilization 0\.01 allows 1\.0 MiB of 100\.0 MiB"):
        prepare(config(base, gpu_memory_utilization=0.01))


def test_too_many_slots_for_the_memory_are_refused(base: Path, free: Any) -> None:
    free(1000 * MIB)
    with pytest.raises(StartupError, match="--max-loras"):
        prepare(config(base, max_loras=1024, max_lora_rank=256))


def test_a_share_sizes_the_pool_after_a_step_was_measured(
    base: Path, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "read_process_bytes", lambda: 20 * MIB)
    free(90 * MIB)
    asked = config(base, gpu_memory_utilization=0.8, max_loras=1, max_lora_rank=8, max_num_seqs=1024)
    prepared = prepare(asked)
    assert (prepared.memory, prepared.plan.kv_bytes) == (None, 0)
    plan = settle(asked, prepared, 5 * MIB)
    left = 80 * MIB - 20 * MIB - 5 * MIB - plan.host_bytes
    assert left - prepared.base.block_bytes(16) < plan.kv_bytes <= left


def test_a_step_that_needs_more_than_was_foreseen_is_refused(base: Path, free: Any) -> None:
    asked = config(base, kv_cache_memory_bytes=MIB)
    prepared = prepare(asked)
    free(50 * MIB)
    assert settle(asked, prepared, 10 * MIB) == replace(prepared.plan, step_bytes=10 * MIB)
    assert settle(asked, prepared, 0) == prepared.plan
    with pytest.raises(StartupError, match=r"a step 60\.0 MiB"):
        settle(asked, prepared, 60 * MIB)


def test_a_context_above_the_pool_names_both_levers(base: Path) -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-memory-bytes.* or lower --max-model-len"):
        prepare(config(base, kv_cache_memory_bytes=64 << 10, max_model_len=512))


def test_a_context_above_the_base_s_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        prepare(config(base, max_model_len=513))


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseUnavailableError, match="nowhere"):
        prepare(config(tmp_path / "nowhere"))


def test_weights_that_changed_since_the_pull_are_refused(tmp_path: Path) -> None:
    source = write_base(tmp_path / "source", tiny_llama_config())
    base = pull(str(source), tmp_path / "bases")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(BaseUnavailableError, match="changed or vanished"):
        prepare(config(base))
