"""Where an engine's memory goes: foreseen before anything is allocated, measured where that can be done, and told.

Host side only: counts bytes from the facts of base and settings, knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import StartupError
from loraplex_engine.loop.machine import MachineMemory
from loraplex_engine.models.config import ModelConfig

_MAX_CPU_KV_BYTES = 2 << 30
_CPU_KV_SHARE = 0.20
_LIBRARY_BYTES = 512 << 20
"""Of an interpreter with torch, generously."""
_LEVERS = (
    "lower --kv-cache-memory-bytes (or --gpu-memory-utilization), --max-num-batched-tokens, --max-loras or "
    "--max-lora-rank"
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. `slot_bytes` are those of every slot at the highest rank in all linears of the layers."""

    weight_bytes: int
    head_bytes: int
    embedding_bytes: int
    """0 where the embedding stays in the file's pages."""
    step_bytes: int
    """What one step at the limits needs beside weights and cache, at its peak."""
    slot_bytes: int
    host_bytes: int
    """As `slot_bytes`, for every adapter in host memory; those in slots are among them."""
    kv_bytes: int = 0
    kv_tokens: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What the base needs whatever is asked of it."""
        return self.weight_bytes + self.head_bytes + self.embedding_bytes

    def check_fits(self, free_bytes: int) -> None:
        """Refuse to start where the kernel would have to end the process later.

        Raises:
            StartupError: The message has the figures and the flags that change them.
        """
        needed = self.fixed_bytes + self.kv_bytes + self.step_bytes + self.slot_bytes
        if needed > free_bytes:
            raise StartupError(
                f"The engine needs {format_size(needed)} (weights {format_size(self.fixed_bytes)}, "
                f"KV cache {format_size(self.kv_bytes)}, a step {format_size(self.step_bytes)}, "
                f"adapter slots {format_size(self.slot_bytes)}), but {format_size(free_bytes)} of memory are free: "
                f"{_LEVERS}."
            )

    def to_lines(self, process_bytes: int, machine: MachineMemory) -> Iterator[str]:
        """The table for people, one line a row: what is taken at once and its sum, adapters at most, what there is.

        Args:
            process_bytes: what this process holds now.
            machine: its memory, or the control group's.
        """
        total = self.fixed_bytes + self.kv_bytes + self.step_bytes
        rows = (
            ("weights of the layers", self.weight_bytes, ""),
            ("head, packed", self.head_bytes, ""),
            ("embedding", self.embedding_bytes, "" if self.embedding_bytes else "served from the file's pages"),
            ("KV cache", self.kv_bytes, f"{self.kv_tokens} tokens"),
            ("a step at the limits", self.step_bytes, ""),
            ("= without adapters", total, ""),
            ("+ adapters, at most", self.host_bytes, f"{format_size(self.slot_bytes)} of them in slots"),
            ("= at most", total + self.host_bytes, ""),
            ("this process now", process_bytes, "with Python and PyTorch"),
            ("the machine", machine.total_bytes, f"{format_size(machine.free_bytes)} free"),
        )
        yield from (f"memory: {name:<24}{format_size(size):>10}  {note}".rstrip() for name, size, note in rows)


def plan_memory(config: EngineConfig, model: ModelConfig, itemsize: int, *, is_mapped: bool) -> MemoryPlan:
    """Foresee everything but the KV cache.

    Args:
        config: settings of the engine.
        model: facts of the base.
        itemsize: bytes of one weight in the model's dtype.
        is_mapped: whether the embedding is served from the file's pages, since the file has the model's dtype.
    """
    vocabulary_bytes = model.vocab_size * model.hidden_size * itemsize
    adapter_bytes = _adapter_values(model, config.max_lora_rank) * itemsize
    return MemoryPlan(
        weight_bytes=model.num_layers * _layer_values(model) * itemsize,
        head_bytes=vocabulary_bytes,
        embedding_bytes=0 if is_mapped else vocabulary_bytes,
        step_bytes=_estimate_step(config, model, itemsize),
        slot_bytes=config.max_loras * adapter_bytes,
        host_bytes=config.num_cpu_loras * adapter_bytes,
    )


def choose_kv_bytes(config: EngineConfig, plan: MemoryPlan, machine: MachineMemory, process_bytes: int) -> int:
    """The budget of the KV cache: the flag's bytes, or what is left of the flag's share, or a bounded default.

    Args:
        config: settings of the engine.
        plan: with the measured need of a step where `--gpu-memory-utilization` is given.
        machine: its memory.
        process_bytes: what the process uses already, the weights among it.

    Raises:
        StartupError: The share that may be used is used already.
    """
    if config.kv_cache_memory_bytes:
        return config.kv_cache_memory_bytes
    if config.gpu_memory_utilization is None:
        return min(_MAX_CPU_KV_BYTES, int(machine.total_bytes * _CPU_KV_SHARE))
    share = int(machine.total_bytes * config.gpu_memory_utilization)
    left = share - process_bytes - plan.step_bytes - plan.host_bytes
    if left <= 0:
        hundredths = 100 * (share - left) // machine.total_bytes + 1
        raise StartupError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization} allows {format_size(share)}, but weights and "
            f"process use {format_size(process_bytes)}, a step {format_size(plan.step_bytes)} and adapters in host "
            f"memory up to {format_size(plan.host_bytes)}: {_raise_to(hundredths)}lower --max-num-batched-tokens, "
            "--max-cpu-loras or --max-lora-rank."
        )
    return left


def check_share(config: EngineConfig, plan: MemoryPlan, machine: MachineMemory, block_bytes: int) -> None:
    """Refuse a share that cannot be enough before the weights are read, and name one that is.

    Args:
        config: settings of the engine, with `gpu_memory_utilization`.
        plan: as foreseen.
        machine: its memory.
        block_bytes: of one KV block.

    Raises:
        StartupError: Weights and adapters in host memory alone are above the share.
    """
    assert config.gpu_memory_utilization is not None, "asked for by a share"
    share = int(machine.total_bytes * config.gpu_memory_utilization)
    if plan.fixed_bytes + plan.host_bytes < share:
        return
    num_blocks = -(-max(config.max_model_len, 1) // config.block_size)
    least = plan.fixed_bytes + plan.host_bytes + plan.step_bytes + _LIBRARY_BYTES + num_blocks * block_bytes
    hundredths = -(-100 * least // machine.total_bytes)
    raise StartupError(
        f"--gpu-memory-utilization {config.gpu_memory_utilization} allows {format_size(share)} of "
        f"{format_size(machine.total_bytes)}, but weights need {format_size(plan.fixed_bytes)} and adapters in host "
        f"memory up to {format_size(plan.host_bytes)}: {_raise_to(hundredths)}lower --max-cpu-loras or --max-lora-rank."
    )


def _raise_to(hundredths: int) -> str:
    return f"raise it to at least {hundredths / 100:.2f}, or " if hundredths <= 100 else ""


def choose_num_blocks(config: EngineConfig, budget: int, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks of the KV pool, never more than all sequences could use.

    Raises:
        StartupError: Not one block fits.
    """
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(budget // bytes_per_block, useful)
    if num_blocks < 1:
        raise StartupError(
            f"The KV cache has {budget} bytes, but one block needs {bytes_per_block}: raise --kv-cache-memory-bytes "
            "or lower --block-size."
        )
    return num_blocks


def _layer_values(model: ModelConfig) -> int:
    return sum(rows * columns for rows, columns in _linear_shapes(model))


def _adapter_values(model: ModelConfig, rank: int) -> int:
    return model.num_layers * sum(rank * (rows + columns) for rows, columns in _linear_shapes(model))


def _linear_shapes(model: ModelConfig) -> Iterator[tuple[int, int]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    yield model.q_size, hidden
    yield from [(model.kv_size, hidden)] * 2
    yield hidden, model.q_size
    yield from [(inner, hidden)] * 2
    yield hidden, inner


def _estimate_step(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Residual, norm and the widest pair of neighbours of every token; scores of every request, twice in float32."""
    attention = 2 * model.q_size + 2 * model.kv_size
    feed_forward = 3 * model.intermediate_size
    width = 3 * model.hidden_size + max(attention, feed_forward)
    scores = config.max_num_seqs * model.vocab_size * (itemsize + 8)
    return config.max_num_batched_tokens * width * itemsize + scores


def format_size(num_bytes: int) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
