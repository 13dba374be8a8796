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

    max_model_len: Annotated[int | None, _flag("Longest prompt plus answer, tokens; default the base's.")] = None
    max_num_seqs: Annotated[int | None, _flag("Requests that run at once; default 16.")] = None
    max_queued_requests: Annotated[int | None, _flag("Requests that wait, at most; default 1024.")] = None
    max_num_batched_tokens: Annotated[int | None, _flag("Tokens computed in one step, at most; default 2048.")] = None
    gpu_memory_utilization: Annotated[
        float | None, _flag("Share of the memory for the engine; what is left of it is KV cache.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None, _flag("KV cache, bytes or as 2GiB; default 2GiB, or a fifth of less memory.")
    ] = None
    block_size: Annotated[int | None, _flag("Positions of one KV block; default 16.")] = None
    dtype: Annotated[str | None, _flag("auto (bfloat16 where the CPU has it, else float32) or either.")] = None
    kv_cache_dtype: Annotated[str | None, _flag("Only auto; others are not built yet.")] = None
    quantization: Annotated[str | None, _flag("Only none; not built yet.")] = None
    enable_prefix_caching: Annotated[bool | None, _flag("Share the KV of equal prompt beginnings; default on.")] = None
    enable_chunked_prefill: Annotated[bool | None, _flag("Long prompts in parts; always on.")] = None
    tensor_parallel_size: Annotated[int | None, _flag("Only 1; splitting the base over cards is not built yet.")] = None
    max_loras: Annotated[int | None, _flag("Adapter slots; default 8.")] = None
    max_cpu_loras: Annotated[int | None, _flag("Adapters kept in host memory; default 4 x max-loras.")] = None
    max_lora_rank: Annotated[int | None, _flag("Highest adapter rank, at most 256; default 64.")] = None
    adapter_cache_bytes: Annotated[
        str | None, _flag("Adapter files kept on disk, bytes or as 2GiB; default 10GiB.")
    ] = None
    device: Annotated[str | None, _flag("auto or cpu; this version serves on the CPU.")] = None
    attention_backend: Annotated[str | None, _flag("Only auto; there is one attention kernel.")] = None
    enforce_eager: Annotated[bool | None, _flag("Always on: there are no captured graphs.")] = None
    seed: Annotated[int | None, _flag("Only 0: each request is seeded by its own `seed`.")] = None
    adapter_load_timeout: Annotated[float | None, _flag("Longest wait for an adapter, seconds; default 60.")] = None
    step_timeout: Annotated[
        float | None, _flag("Silence after which the core counts as stuck, seconds; default 60.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _flag("auto, hermes, llama3_json, mistral, mistral_named or granite; default auto: by the template."),
    ] = None
    cpu_threads: Annotated[int | None, _flag("Threads of the step loop; default the cores that it may use.")] = None

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
