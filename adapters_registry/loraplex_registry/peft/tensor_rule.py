"""Matches the tensors of a file to the modules that the config targets: nothing missing, nothing left over.

Judges names, shapes, dtypes and ranks from the header alone; no tensor byte is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from loraplex_registry.peft.findings import Findings, show
from loraplex_registry.peft.header import TensorTable
from loraplex_registry.peft.spec import BaseSpec, LoraModule, ModuleSpec, TensorRef
from loraplex_registry.peft.target import Target

SERVED_DTYPES = ("F32", "F16", "BF16")

_PREFIX = "base_model.model."
_LORA_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])\.weight")
_RESAVE = "save the adapter with PEFT's save_pretrained"
_STRANGERS = (
    (re.compile(r".*\.lora_magnitude_vector(\..*)?"), "is a DoRA magnitude, which is not served yet; train plain LoRA"),
    (re.compile(r".*\.lora_[AB]\.bias"), "is a bias of a LoRA layer, which is not served yet; train without lora_bias"),
    (re.compile(r".*\.lora_embedding_[AB](\..*)?"), "is LoRA on an embedding, which is not served yet; leave it out"),
    (re.compile(r".*\.trainable_tokens_.*"), "holds trained token rows, which are not served yet; train without them"),
    (re.compile(r".*\.lora_[AB]\..+\.weight"), f"has an adapter's name inside; {_RESAVE}"),
    (re.compile(r".*\.(lora_[A-Za-z]+|ranknum)"), "does not belong to plain LoRA; train a LORA adapter"),
    (re.compile(r".*\.bias"), "is a trained bias, which is not served yet; train with bias none"),
    (re.compile(r".*\.modules_to_save\..*"), f"is a whole module, which is not served yet; {_RESAVE} without it"),
)

Halves = dict[str, TensorRef]


def match_tensors(
    table: TensorTable, targets: Sequence[Target], base: BaseSpec, findings: Findings
) -> list[LoraModule]:
    """Pair the tensors of each target, and name every tensor that is missing, foreign or of the wrong shape.

    Adds the checks `unmatched_tensors`, `unpaired_tensors`, `missing_tensors`, `unexpected_tensor`, `shape`,
    `rank_mismatch` and, for dtypes that are not served, `format`.

    Returns:
        One module for each target whose pair is complete, in the targets' order; only meaningful where none failed.
    """
    pairs, strangers = _group_tensors(table.tensors)
    path_to_target = {target.path: target for target in targets}
    for ref in strangers:
        _judge_stranger(ref, base, findings)
    for path, halves in pairs.items():
        if path not in path_to_target:
            _refuse_unmatched(path, halves, base, findings)
    modules = [
        module
        for target in targets
        if (module := _match_target(target, pairs.get(target.path, {}), base.modules[target.path], findings))
    ]
    findings.settle("unmatched_tensors", "unpaired_tensors", "missing_tensors", "unexpected_tensor", "shape")
    findings.settle("rank_mismatch")
    return modules


def judge_whole_matrices(table: TensorTable, base: BaseSpec, findings: Findings) -> None:
    """Only the check `shape` for saved base matrices: what to say where the config itself is refused."""
    for ref in _group_tensors(table.tensors)[1]:
        _judge_matrix_shape(ref, base, findings)
    findings.settle("shape")


def judge_rank_limit(ranks: Iterable[int], base: BaseSpec, findings: Findings) -> None:
    """Add the check `rank_limit` for the ranks that the config declares."""
    rank = max(ranks)
    if rank > base.max_lora_rank:
        message = f"Rank {rank} is above the limit of {base.max_lora_rank} for {base.name}; train a smaller rank."
        findings.fail("rank_limit", message, "r")
    findings.settle("rank_limit")


def _group_tensors(refs: Iterable[TensorRef]) -> tuple[dict[str, Halves], list[TensorRef]]:
    pairs: dict[str, Halves] = {}
    strangers = []
    for ref in refs:
        if found := _LORA_NAME.fullmatch(ref.name):
            pairs.setdefault(found["path"], {})[found["half"]] = ref
        else:
            strangers.append(ref)
    return pairs, strangers


def _judge_stranger(ref: TensorRef, base: BaseSpec, findings: Findings) -> None:
    if _judge_matrix_shape(ref, base, findings):
        return
    what = "" if findings.is_full("unexpected_tensor") else _describe_stranger(ref.name, base)
    findings.fail("unexpected_tensor", f"{show(ref.name)} {what}.", ref.name)


def _judge_matrix_shape(ref: TensorRef, base: BaseSpec, findings: Findings) -> bool:
    """Whether the tensor is a base's matrix of another shape, as a resized vocabulary leaves it."""
    module = _matrix_module(ref.name, base)
    if module is None or ref.shape == (expected := _matrix_shape(module)):
        return False
    rows = f" (the base's vocabulary has {base.vocab_size} rows)" if module.kind in ("embedding", "head") else ""
    message = f"{show(ref.name)} has shape {list(ref.shape)}, the base {list(expected)}{rows}; train on this base."
    findings.fail("shape", message, ref.name)
    return True


def _matrix_module(name: str, base: BaseSpec) -> ModuleSpec | None:
    if not name.startswith(_PREFIX) or not name.endswith(".weight"):
        return None
    return base.modules.get(name.removeprefix(_PREFIX).removesuffix(".weight").removesuffix(".base_layer"))


def _matrix_shape(module: ModuleSpec) -> tuple[int, ...]:
    return (module.out_features,) if module.kind == "norm" else (module.out_features, module.in_features)


def _describe_stranger(name: str, base: BaseSpec) -> str:
    if _matrix_module(name, base) is not None:
        return f"is a whole matrix of the base, which is not served yet; {_RESAVE}(save_embedding_layers=False)"
    described = next((what for pattern, what in _STRANGERS if pattern.fullmatch(name)), None)
    if described is not None:
        return described
    if not name.startswith(_PREFIX):
        return f"does not start with {_PREFIX}; {_RESAVE}"
    return f"is not a tensor of plain LoRA; {_RESAVE}"


def _refuse_unmatched(path: str, halves: Halves, base: BaseSpec, findings: Findings) -> None:
    what = "is not targeted by the config" if path in base.modules else "is not a module of the base"
    for ref in halves.values():
        message = f"{show(path)} {what}, so its tensor would be ignored; make config and weights agree."
        findings.fail("unmatched_tensors", message, ref.name)


def _match_target(target: Target, halves: Halves, module: ModuleSpec, findings: Findings) -> LoraModule | None:
    names = {half: f"{_PREFIX}{target.path}.lora_{half}.weight" for half in "AB"}
    absent = [names[half] for half in "AB" if half not in halves]
    if len(absent) == 2:
        message = f"The config targets {target.path} but its tensors are missing; save the whole adapter."
        findings.fail("missing_tensors", message, names["A"])
        return None
    if absent:
        findings.fail("unpaired_tensors", f"{absent[0]} is missing beside its other half; save both.", absent[0])
        return None
    a, b = halves["A"], halves["B"]
    _judge_dtype(a, findings)
    _judge_dtype(b, findings)
    _judge_shape(a, target, 1, module.in_features, findings)
    _judge_shape(b, target, 0, module.out_features, findings)
    return LoraModule(target.path, target.rank, target.scaling, a, b)


def _judge_dtype(ref: TensorRef, findings: Findings) -> None:
    if ref.dtype not in SERVED_DTYPES:
        message = f"{ref.name} is stored as {ref.dtype}; save the adapter as float32, float16 or bfloat16."
        findings.fail("format", message, ref.name)


def _judge_shape(ref: TensorRef, target: Target, axis: int, features: int, findings: Findings) -> None:
    """`axis` is where the base's features lie; the other axis is the rank."""
    expected = [target.rank, features] if axis == 1 else [features, target.rank]
    if len(ref.shape) != 2 or ref.shape[axis] != features:
        message = f"{ref.name} has shape {list(ref.shape)}, the base needs {expected}; train on this base."
        findings.fail("shape", message, ref.name)
    elif ref.shape[1 - axis] != target.rank:
        message = f"{ref.name} has rank {ref.shape[1 - axis]} but the config says {target.rank}; make both agree."
        findings.fail("rank_mismatch", message, ref.name)
