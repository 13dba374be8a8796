"""`build_plan`: from a model's sizes, adapters and a card to bytes, tokens and cards. Pure, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from loraplex.errors import InvalidRequestError
from loraplex.plan.adapter import (
    MAX_COUNT,
    AdapterGroup,
    count_layer_parameters,
    count_parameters,
    expand_modules,
)
from loraplex.plan.card import Card, read_card
from loraplex.plan.explain import explain, quote
from loraplex.plan.figures import AdapterFigures, CardFigures, CopyFigures, ModelFigures, Plan, SlotFigures
from loraplex.plan.preset import PRESETS, find_preset
from loraplex.plan.shape import ModelShape, read_shape
from loraplex.plan.spec import DTYPE_TO_BYTES, PlanSpec, check_spec

_DEFAULT_SLOTS = 8
_SCORE_BYTES = 8
"""Of each score of a token of the vocabulary, beside its own: twice in float32 while tokens are chosen."""


def build_plan(spec: PlanSpec) -> Plan:
    """Answer a question to the planner.

    Raises:
        InvalidRequestError: The model, card or modules are not known, or a number makes no sense.
    """
    check_spec(spec)
    name, shape = _read_model(spec)
    card = read_card(spec.gpu)
    adapters = [_describe_group(group, shape, spec) for group in spec.adapters]
    if sum(group.count for group in adapters) > MAX_COUNT:
        raise InvalidRequestError(f"There are more than {MAX_COUNT:,} adapters.", param="adapters")
    found = _choose_card(spec, shape, card, adapters)
    plan = Plan(
        model=_describe_model(name, shape, spec),
        adapters=adapters,
        card=found,
        slots=_list_slots(spec, shape, card, adapters, found.tensor_parallel_size),
        copies=_compare_copies(spec, shape, card, adapters, found),
        quoted=quote(_weigh(shape, spec), adapters),
    )
    return msgspec.structs.replace(plan, explanation=explain(plan, shape, spec))


def _read_model(spec: PlanSpec) -> tuple[str, ModelShape]:
    if spec.config is not None:
        return spec.model, read_shape(spec.config)
    preset = find_preset(spec.model)
    if preset is None:
        raise InvalidRequestError(
            f"The model {spec.model!r} is none of {', '.join(PRESETS)}; give its config.json as `config`.",
            param="model",
        )
    return preset[0], read_shape(preset[1])


def _weigh(shape: ModelShape, spec: PlanSpec) -> int:
    return shape.num_parameters * DTYPE_TO_BYTES[spec.dtype]


def _kv_dtype(spec: PlanSpec) -> str:
    return spec.dtype if spec.kv_cache_dtype == "auto" else spec.kv_cache_dtype


def _describe_model(name: str, shape: ModelShape, spec: PlanSpec) -> ModelFigures:
    return ModelFigures(
        name=name,
        architecture=shape.architecture,
        dtype=spec.dtype,
        num_parameters=shape.num_parameters,
        weight_bytes=_weigh(shape, spec),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_bytes_per_token={dtype: shape.kv_values * DTYPE_TO_BYTES[dtype] for dtype in ("float32", "bfloat16", "fp8")},
        max_position_embeddings=shape.max_position_embeddings,
    )


def _describe_group(group: AdapterGroup, shape: ModelShape, spec: PlanSpec) -> AdapterFigures:
    num_parameters = count_parameters(group, shape)
    adapter_bytes = num_parameters * DTYPE_TO_BYTES[spec.dtype]
    return AdapterFigures(
        count=group.count,
        rank=group.rank,
        modules=list(expand_modules(group.modules)),
        layer_parameters=None if group.num_parameters is not None else count_layer_parameters(group, shape),
        num_parameters=num_parameters,
        adapter_bytes=adapter_bytes,
        total_bytes=group.count * adapter_bytes,
    )


def _sum_largest(adapters: Sequence[AdapterFigures], num_slots: int) -> int:
    """Bytes of the largest adapters that so many slots can hold."""
    total, left = 0, num_slots
    for group in sorted(adapters, key=lambda one: -one.adapter_bytes):
        taken = min(left, group.count)
        total, left = total + taken * group.adapter_bytes, left - taken
    return total


def _choose_slots(spec: PlanSpec, adapters: Sequence[AdapterFigures]) -> int:
    num_adapters = sum(group.count for group in adapters)
    return min(_DEFAULT_SLOTS, num_adapters) if spec.max_loras is None else spec.max_loras


def _estimate_step(shape: ModelShape, spec: PlanSpec) -> int:
    """As the engine foresees it: residual, norm, the widest neighbours of every token, and scores of each request."""
    width = 3 * shape.hidden_size + max(2 * shape.q_size + 2 * shape.kv_size, 3 * shape.intermediate_size)
    itemsize = DTYPE_TO_BYTES[spec.dtype]
    return spec.max_num_batched_tokens * width * itemsize + spec.max_num_seqs * shape.vocab_size * (
        itemsize + _SCORE_BYTES
    )


def list_splits(shape: ModelShape) -> list[int]:
    """Numbers of cards over which the model can be split: powers of two that divide its heads."""
    return [size for size in (1, 2, 4, 8, 16) if shape.num_kv_heads % size == 0]


def _choose_card(spec: PlanSpec, shape: ModelShape, card: Card, adapters: Sequence[AdapterFigures]) -> CardFigures:
    """The smallest split that holds one request of the full length; one card, with the reason, where none does."""
    num_slots = _choose_slots(spec, adapters)
    found = [_fill(spec, shape, card, adapters, num_slots, size) for size in list_splits(shape)]
    fitting = next((one for one in found if one.fits), None)
    best = fitting or found[0]
    return msgspec.structs.replace(best, verdict=_judge(found[0], fitting, found[-1]))


def _fill(
    spec: PlanSpec, shape: ModelShape, card: Card, adapters: Sequence[AdapterFigures], num_slots: int, size: int
) -> CardFigures:
    usable = int(card.memory_bytes * Fraction(str(spec.gpu_memory_utilization)))
    weights, slots = -(-_weigh(shape, spec) // size), -(-_sum_largest(adapters, num_slots) // size)
    step = _estimate_step(shape, spec)
    left = usable - weights - step - spec.overhead_bytes - slots
    token_bytes = shape.kv_values * DTYPE_TO_BYTES[_kv_dtype(spec)] // size
    kv_tokens = max(0, left) // (token_bytes * spec.block_size) * spec.block_size
    max_model_len = spec.max_model_len or shape.max_position_embeddings
    full_contexts = kv_tokens // (-(-max_model_len // spec.block_size) * spec.block_size)
    return CardFigures(
        name=card.name,
        memory_bytes=card.memory_bytes,
        usable_bytes=usable,
        tensor_parallel_size=size,
        weight_bytes=weights,
        step_bytes=step,
        overhead_bytes=spec.overhead_bytes,
        max_loras=num_slots,
        slot_bytes=slots,
        free_bytes=left,
        kv_bytes_per_token=token_bytes,
        kv_tokens=kv_tokens,
        max_model_len=max_model_len,
        max_num_seqs=spec.max_num_seqs,
        full_contexts=full_contexts,
        tokens_per_request=kv_tokens // spec.max_num_seqs,
        fits=full_contexts > 0,
        verdict="",
    )


def _judge(alone: CardFigures, fitting: CardFigures | None, widest: CardFigures) -> str:
    """Say in one sentence what to do."""
    shorter = f"one {alone.name} fits with --max-model-len {alone.kv_tokens} or less"
    if fitting is alone:
        return f"One {alone.name} fits."
    if fitting is not None:
        needed = f"{fitting.tensor_parallel_size} cards fit (--tensor-parallel-size {fitting.tensor_parallel_size})"
        return f"{needed[0].upper()}{needed[1:]}" + (f"; {shorter}." if alone.kv_tokens else ".")
    if alone.kv_tokens:
        return f"{shorter[0].upper()}{shorter[1:]}."
    size = widest.tensor_parallel_size
    return (
        f"It does not fit, also not over {size} cards, the most that its KV heads allow; take a larger card."
        if not widest.kv_tokens
        else f"{size} cards fit with --max-model-len {widest.kv_tokens} or less (--tensor-parallel-size {size})."
    )


def _list_slots(
    spec: PlanSpec, shape: ModelShape, card: Card, adapters: Sequence[AdapterFigures], size: int
) -> list[SlotFigures]:
    num_adapters = sum(group.count for group in adapters)
    powers = {1 << power for power in range(num_adapters.bit_length())}
    wanted = {count for count in powers | {num_adapters, _choose_slots(spec, adapters)} if 0 < count <= num_adapters}
    rows = [_fill(spec, shape, card, adapters, count, size) for count in sorted(wanted)]
    return [
        SlotFigures(
            max_loras=row.max_loras,
            slot_bytes=row.slot_bytes,
            kv_tokens=row.kv_tokens,
            full_contexts=row.full_contexts,
        )
        for row in rows
    ]


def _compare_copies(
    spec: PlanSpec, shape: ModelShape, card: Card, adapters: Sequence[AdapterFigures], found: CardFigures
) -> CopyFigures | None:
    num_copies = sum(group.count for group in adapters)
    if not num_copies:
        return None
    weights, total = _weigh(shape, spec), sum(group.total_bytes for group in adapters)
    context = -(-found.max_model_len // spec.block_size) * spec.block_size
    token_bytes = shape.kv_values * DTYPE_TO_BYTES[_kv_dtype(spec)]
    copy_bytes = weights + _estimate_step(shape, spec) + spec.overhead_bytes + context * token_bytes
    copies_per_gpu = found.usable_bytes // copy_bytes
    split = next((size for size in list_splits(shape) if _fill(spec, shape, card, (), 0, size).fits), None)
    gpus_for_copies = -(-num_copies // copies_per_gpu) if copies_per_gpu else split and num_copies * split
    return CopyFigures(
        num_copies=num_copies,
        copies_bytes=num_copies * weights,
        adapters_bytes=total,
        base_and_adapters_bytes=weights + total,
        ratio_tenths=(10 * num_copies * weights + total // 2) // total,
        gpus_for_weights=-(-num_copies * weights // card.memory_bytes),
        copy_bytes=copy_bytes,
        copies_per_gpu=copies_per_gpu,
        gpus_for_copies=gpus_for_copies,
        gpus_for_adapters=found.tensor_parallel_size if found.fits else None,
    )
