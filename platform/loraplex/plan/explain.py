"""A plan for people: each figure with its unit and the formula behind it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from loraplex.plan.figures import AdapterFigures, CardFigures, CopyFigures, Plan, QuotedFigures, Row, Section
from loraplex.plan.shape import LAYER_MODULES, ModelShape
from loraplex.plan.spec import DTYPE_TO_BYTES, PlanSpec

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def explain(plan: Plan, shape: ModelShape, spec: PlanSpec) -> list[Section]:
    """Return the plan's figures as sections of rows.

    Args:
        plan: With all figures.
        shape: The model's sizes, which the formulas name.
        spec: The question, for the flags behind a figure.
    """
    sections = [_explain_model(plan, shape)]
    sections += [_explain_group(group, shape, plan) for group in plan.adapters]
    sections.append(_explain_card(plan.card, spec))
    if plan.copies is not None:
        sections.append(_explain_copies(plan.copies, plan))
    if plan.quoted is not None:
        sections.append(_explain_quoted(plan.quoted))
    return sections


def quote(weight_bytes: int, adapters: Sequence[AdapterFigures]) -> QuotedFigures | None:
    """Return the sum as it is quoted: rounded decimal megabytes, divided by 1,024 and called GiB.

    None where there is nothing that two decimals show.
    """
    total, count = sum(group.total_bytes for group in adapters), sum(group.count for group in adapters)
    megabytes = sum(group.count * Fraction(_round(Fraction(group.adapter_bytes, 10**5)), 10) for group in adapters)
    mixed_hundredths = _round(Fraction(megabytes, 1024) * 100)
    if not mixed_hundredths:
        return None
    copies = Fraction(count * weight_bytes)
    # the quoted ratio is of the rounded figures: 598 over 1.07, to two figures
    ratio = Fraction(_round(copies / _GIB) * 100, mixed_hundredths)
    return QuotedFigures(
        mixed_gib=f"{mixed_hundredths / 100:.2f} GiB",
        exact_gib=f"{_decimals(Fraction(total, _GIB), 3)} GiB",
        mixed_ratio=f"{_round(ratio / 10) * 10}x",
        exact_ratio=f"{_round(copies / total)}x",
        reason=(
            f"{_decimals(Fraction(megabytes), 1)} MB (10^6 bytes, each adapter rounded to 0.1) were divided by 1,024 "
            "as if they were MiB (2^20 bytes), which gives neither GB nor GiB; then the rounded figures were divided"
        ),
    )


def _explain_model(plan: Plan, shape: ModelShape) -> Section:
    model, itemsize = plan.model, DTYPE_TO_BYTES[plan.model.dtype]
    matrices = "1 x (head tied)" if shape.is_tied else "2 x"
    rows = [
        Row(
            "parameters",
            f"{model.num_parameters:,}",
            f"{matrices} {shape.vocab_size:,} x {shape.hidden_size:,} + {shape.num_layers} layers x "
            f"{shape.layer_parameters:,} + {shape.hidden_size:,}",
        ),
        Row(
            f"weights in {model.dtype}",
            show_size(model.weight_bytes),
            f"{model.num_parameters:,} x {itemsize} B = {model.weight_bytes:,} B",
        ),
    ]
    for dtype, size in model.kv_bytes_per_token.items():
        rows.append(
            Row(
                f"KV cache in {dtype}",
                f"{show_size(size)} a token",
                f"2 (K, V) x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x "
                f"{DTYPE_TO_BYTES[dtype]} B = {size:,} B",
            )
        )
    return Section(f"Model {model.name} ({model.architecture})", rows)


def _explain_group(group: AdapterFigures, shape: ModelShape, plan: Plan) -> Section:
    itemsize = DTYPE_TO_BYTES[plan.model.dtype]
    features = shape.module_to_features
    in_layer = [name for name in group.modules if name in LAYER_MODULES]
    outer = [name for name in group.modules if name not in LAYER_MODULES]
    rows = []
    if group.layer_parameters is not None:
        sums = " + ".join(f"({features[name][0]:,} + {features[name][1]:,})" for name in in_layer)
        rows.append(Row("parameters a layer", f"{group.layer_parameters:,}", f"{group.rank} x [{sums or '0'}]"))
        rest = "".join(f" + {group.rank} x ({sum(features[name]):,})" for name in outer)
        rows.append(
            Row(
                "parameters",
                f"{group.num_parameters:,}",
                f"{group.layer_parameters:,} x {shape.num_layers} layers{rest}",
            )
        )
    else:
        rows.append(Row("parameters", f"{group.num_parameters:,}", "counted in the adapter's file"))
    share = _decimals(Fraction(100 * group.num_parameters, plan.model.num_parameters), 2)
    rows += [
        Row(
            f"one adapter in {plan.model.dtype}",
            _show_both(group.adapter_bytes, (10**6, "MB", 2), (_MIB, "MiB", 1)),
            f"{group.num_parameters:,} x {itemsize} B, {share} % of the base",
        ),
        Row(
            f"{group.count:,} adapters",
            _show_both(group.total_bytes, (10**9, "GB", 2), (_GIB, "GiB", 3)),
            f"{group.count:,} x {group.adapter_bytes:,} B = {group.total_bytes:,} B",
        ),
    ]
    names = ", ".join(name.removesuffix("_proj") for name in group.modules)
    return Section(
        f"{group.count:,} {'adapter' if group.count == 1 else 'adapters'} of rank {group.rank} on {names}", rows
    )


def _explain_card(card: CardFigures, spec: PlanSpec) -> Section:
    size = card.tensor_parallel_size
    over = "" if size == 1 else f", a share of {size}"
    rows = [
        Row("memory", show_size(card.memory_bytes), "what its driver reports"),
        Row(
            "for the engine",
            show_size(card.usable_bytes),
            f"--gpu-memory-utilization {spec.gpu_memory_utilization} x {card.memory_bytes:,} B",
        ),
        Row("- weights", show_size(card.weight_bytes), f"as above{over}"),
        Row(
            "- a step at the limits",
            show_size(card.step_bytes),
            f"{spec.max_num_batched_tokens:,} tokens' activations, {card.max_num_seqs:,} requests' scores; an estimate",
        ),
        Row("- driver, libraries", show_size(card.overhead_bytes), "assumed (--overhead-gib)"),
        Row("- adapter slots", show_size(card.slot_bytes), f"the {card.max_loras:,} largest adapters{over}"),
        Row("= for the KV cache", show_size(card.free_bytes), ""),
        Row(
            "KV cache",
            f"{card.kv_tokens:,} tokens",
            f"{max(0, card.free_bytes):,} B / {card.kv_bytes_per_token:,} B a token, whole blocks of {spec.block_size}",
        ),
        Row(
            "requests of full length",
            f"{card.full_contexts:,}",
            f"{card.kv_tokens:,} / {card.max_model_len:,} tokens (--max-model-len)",
        ),
        Row(
            "tokens a request",
            f"{card.tokens_per_request:,}",
            f"{card.kv_tokens:,} / {card.max_num_seqs:,} (--max-num-seqs), on average, when all seats are taken",
        ),
    ]
    title = f"{card.name} x {size}" if size > 1 else card.name
    return Section(f"On {title}: {card.verdict}", rows)


def _explain_copies(copies: CopyFigures, plan: Plan) -> Section:
    weights, card = plan.model.weight_bytes, plan.card
    processes = (
        f"{copies.num_copies:,} / {copies.copies_per_gpu} a card, each with a step, libraries and one full context: "
        f"{show_size(copies.copy_bytes)}"
        if copies.copies_per_gpu
        else "each over several cards"
        if copies.gpus_for_copies
        else "none fits, also not over several cards"
    )
    return Section(
        f"{copies.num_copies:,} full copies against {copies.num_copies:,} adapters",
        [
            Row(
                "full copies",
                show_size(copies.copies_bytes),
                f"{copies.num_copies:,} x {weights:,} B = {copies.copies_bytes:,} B",
            ),
            Row(
                "one base and adapters",
                show_size(copies.base_and_adapters_bytes),
                f"{weights:,} + {copies.adapters_bytes:,} B",
            ),
            Row(
                "copies over adapters",
                f"{_round(Fraction(copies.ratio_tenths, 10))}x",
                f"{copies.copies_bytes:,} B / {copies.adapters_bytes:,} B, without the one base that adapters need",
            ),
            Row(
                "cards for the copies' weights",
                f"{copies.gpus_for_weights:,}",
                f"{show_size(copies.copies_bytes)} / {show_size(card.memory_bytes)}, weights alone",
            ),
            Row("cards for copies that serve", _show_count(copies.gpus_for_copies), processes),
            Row(
                "cards for base and adapters",
                _show_count(copies.gpus_for_adapters),
                "one replica; more for more traffic",
            ),
        ],
    )


def _explain_quoted(quoted: QuotedFigures) -> Section:
    return Section(
        "Figures that are quoted with units mixed",
        [
            Row("adapters", f"{quoted.exact_gib}, quoted {quoted.mixed_gib}", quoted.reason),
            Row(
                "copies over adapters",
                f"{quoted.exact_ratio}, quoted {quoted.mixed_ratio}",
                "follows from the line above",
            ),
        ],
    )


def show_size(num_bytes: int) -> str:
    """Bytes in KiB, MiB or GiB, to three or four figures."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            digits = 0 if size % unit == 0 or size >= 100 * unit else 2
            return f"{sign}{_decimals(Fraction(size, unit), digits)} {name}"
    return f"{sign}{size} B"


def _show_both(num_bytes: int, *units: tuple[int, str, int]) -> str:
    """The same size in decimal and in binary units."""
    return " = ".join(f"{_decimals(Fraction(num_bytes, unit), digits)} {name}" for unit, name, digits in units)


def _show_count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _round(value: Fraction) -> int:
    """To the nearest whole number, halves upwards."""
    return int(value + Fraction(1, 2))


def _decimals(value: Fraction, digits: int) -> str:
    """A number of zero or more with so many digits behind the point, rounded exactly."""
    scaled = _round(value * 10**digits)
    whole, rest = divmod(scaled, 10**digits)
    return f"{whole:,}.{rest:0{digits}d}" if digits else f"{whole:,}"
