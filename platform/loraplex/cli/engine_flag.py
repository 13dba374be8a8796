"""The engine's flags as `loraplex up` takes them; the engine itself refuses what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

_GROUP = Group("Engine", help="Also as LORAPLEX_ENGINE_*.", sort_key=10)


def _flag(text: str) -> Parameter:
    return Parameter(help=text, group=_GROUP)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Flags named as the field names them; None is the engine's own default."""

    max_model_len: Annotated[int | None, _flag("Longest prompt plus answer, tokens.")] = None
    max_num_seqs: Annotated[int | None, _flag("Requests that run at once.")] = None
    max_num_batched_tokens: Annotated[int | None, _flag("Tokens computed in one step, at most.")] = None
    gpu_memory_utilization: Annotated[float | None, _flag("Share of the accelerator's memory, 0 to 1.")] = None
    kv_cache_memory_bytes: Annotated[int | None, _flag("Size of the KV cache, bytes.")] = None
    block_size: Annotated[int | None, _flag("Positions of one KV block.")] = None
    dtype: Annotated[str | None, _flag("auto, float32 or bfloat16.")] = None
    kv_cache_dtype: Annotated[str | None, _flag("auto; others are not built yet.")] = None
    quantization: Annotated[str | None, _flag("Not built yet.")] = None
    enable_prefix_caching: Annotated[bool | None, _flag("Share the KV of equal prompt beginnings.")] = None
    enable_chunked_prefill: Annotated[bool | None, _flag("Compute long prompts in parts.")] = None
    tensor_parallel_size: Annotated[int | None, _flag("Cards that share the base; 1, others are not built yet.")] = None
    max_loras: Annotated[int | None, _flag("Adapter slots on the device.")] = None
    max_cpu_loras: Annotated[int | None, _flag("Adapters kept in host memory.")] = None
    max_lora_rank: Annotated[int | None, _flag("Highest adapter rank.")] = None
    device: Annotated[str | None, _flag("auto, cuda or cpu.")] = None
    attention_backend: Annotated[str | None, _flag("Attention kernel; auto, others are not built yet.")] = None
    enforce_eager: Annotated[bool | None, _flag("Never capture graphs.")] = None
    seed: Annotated[int | None, _flag("Seed of choices that no request seeds.")] = None
    adapter_load_timeout: Annotated[float | None, _flag("Longest wait for an adapter, seconds.")] = None
    cpu_threads: Annotated[int | None, _flag("Threads of the step loop.")] = None

    def to_argv(self) -> tuple[str, ...]:
        """Return the flags that were given, as the engine's program takes them."""
        argv: list[str] = []
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if isinstance(value, bool):
                argv.append(f"--{name}" if value else f"--no-{name}")
            elif value is not None:
                argv += [f"--{name}", str(value)]
        return tuple(argv)
