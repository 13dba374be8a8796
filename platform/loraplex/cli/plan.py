"""`loraplex plan`: what base, adapters and cache need on a card, computed on this machine without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from loraplex.cli.output import AsJson, print_json, print_table, stdout
from loraplex.cli.plan_model import resolve_model
from loraplex.client.errors import ClientError

if TYPE_CHECKING:
    from loraplex.plan.adapter import AdapterGroup
    from loraplex.plan.figures import Plan

_GIB = 1 << 30
Many = Parameter(negative=())


def plan(
    *,
    model: str = "llama-3.1-8b",
    adapters: Annotated[list[int] | None, Many] = None,
    rank: Annotated[list[int] | None, Many] = None,
    modules: Annotated[list[str] | None, Many] = None,
    adapter_dir: Path | None = None,
    gpu: str = "h100-80g",
    gpu_memory_utilization: float = 0.9,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_loras: int | None = None,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    overhead_gib: float = 1.0,
    as_json: AsJson = False,
) -> int:
    """Say what a base and its adapters need, and what fits on a card; the exit code is 1 if one request does not fit.

    Args:
        model: A preset, a folder with config.json, a pulled base, or a hub id. Default llama-3.1-8b.
        adapters: How many; repeat it, with rank and modules, for more groups.
        rank: Of the group's adapters. Default 16.
        modules: q,k,v,o,gate,up,down,embed,head, or attention, mlp, all. Default q,k,v,o.
        adapter_dir: Count the adapters in this folder, from the headers of their files.
        gpu: t4, l4, a10, l40s, a100-40g, a100-80g, h100-80g, h200, or memory, as in 24GiB. Default h100-80g.
        gpu_memory_utilization: Share of the card for the engine. Default 0.9.
        max_model_len: Longest prompt plus answer, tokens. Default the model's own.
        max_num_seqs: Requests that run at once. Default 256.
        max_num_batched_tokens: Tokens computed in one step, at most. Default 8192.
        max_loras: Adapter slots. Default 8, or as many as there are adapters if fewer.
        dtype: bfloat16, float16 or float32, of weights and adapters.
        kv_cache_dtype: auto (as dtype), bfloat16, float16, float32 or fp8.
        block_size: Positions of one KV block. Default 16.
        overhead_gib: What driver and libraries hold on a card, assumed. Default 1.
        as_json: Print JSON for programs.
    """
    import msgspec

    from loraplex.plan.planner import build_plan
    from loraplex.plan.spec import PlanSpec

    name, config = resolve_model(model)
    fields = {
        "model": name,
        "config": config,
        "adapters": [msgspec.to_builtins(group) for group in _list_groups(adapters, rank, modules, adapter_dir)],
        "gpu": gpu,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_loras": max_loras,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "overhead_bytes": round(overhead_gib * _GIB),
    }
    try:
        found = build_plan(msgspec.convert(fields, PlanSpec))
    except msgspec.ValidationError as error:
        raise ClientError(f"{error}.", code="invalid_request_error") from error
    if as_json:
        print_json(found)
    else:
        _print(found)
    return 0 if found.card.fits else 1


def _list_groups(
    counts: list[int] | None, ranks: list[int] | None, modules: list[str] | None, folder: Path | None
) -> list[AdapterGroup]:
    """The groups that were told one after another; a single rank or list of modules is that of all of them."""
    from loraplex.plan.adapter import AdapterGroup
    from loraplex.plan.adapter_folder import read_adapter_folder

    groups = read_adapter_folder(folder) if folder is not None else []
    if counts is None:
        if ranks or modules:
            raise ClientError("Say how many adapters there are: --adapters 40.", code="wrong_call", param="adapters")
        return groups
    for name, values in (("rank", ranks), ("modules", modules)):
        if values and len(values) not in (1, len(counts)):
            raise ClientError(
                f"--{name} is given {len(values)} times, but --adapters {len(counts)} times.",
                code="wrong_call",
                param=name,
            )
    all_ranks = (ranks or [16]) * (len(counts) if not ranks or len(ranks) == 1 else 1)
    all_modules = (modules or ["q,k,v,o"]) * (len(counts) if not modules or len(modules) == 1 else 1)
    return groups + [
        AdapterGroup(count=count, rank=rank, modules=[part.strip() for part in names.split(",")])
        for count, rank, names in zip(counts, all_ranks, all_modules, strict=True)
    ]


def _print(found: Plan) -> None:
    for section in found.explanation:
        rows = ((row.name, row.value, row.formula) for row in section.rows)
        print_table(section.title, ("", "", "from"), rows, empty="")
        stdout().print()
    if found.slots:
        print_table(
            f"Slots against KV tokens on {found.card.name}",
            ("--max-loras", "slots hold", "KV cache, tokens", "requests of full length"),
            (
                (f"{row.max_loras:,}", _mib(row.slot_bytes), f"{row.kv_tokens:,}", row.full_contexts)
                for row in found.slots
            ),
            empty="",
        )


def _mib(num_bytes: int) -> str:
    from loraplex.plan.explain import show_size

    return show_size(num_bytes)
