"""Matches the tensors of a file to what the config claims of the base: nothing missing, nothing left over.

Judges names, shapes, dtypes and ranks from the header alone; no tensor byte is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from loraplex_registry.peft.claim import Claims, RowClaim
from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.findings import Findings, listed, show
from loraplex_registry.peft.header import TensorTable
from loraplex_registry.peft.spec import (
    MAX_LORA_RANK,
    BaseSpec,
    LoraModule,
    ModuleSpec,
    SavedTensor,
    TensorRef,
    TokenRows,
)
from loraplex_registry.peft.target import Target, find_unknown_names
from loraplex_registry.peft.tying import Tie

SERVED_DTYPES = ("F32", "F16", "BF16")
MATRIX_KINDS = ("embedding", "head")

_PREFIX = "base_model.model."
# older releases of PEFT spell a magnitude with .weight, and a trained bias without .base_layer
_PARTS = (
    ("lora_A", r"lora_A\.weight"),
    ("lora_B", r"lora_B\.weight"),
    ("lora_embedding_A", r"lora_embedding_A"),
    ("lora_embedding_B", r"lora_embedding_B"),
    ("lora_bias", r"lora_B\.bias"),
    ("magnitude", r"lora_magnitude_vector(?:\.weight)?"),
    ("rows", r"token_adapter\.trainable_tokens_delta"),
    ("bias", r"(?:base_layer\.)?bias"),
    ("weight", r"weight"),
    ("base_weight", r"base_layer\.weight"),
)
_LORA_PARTS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_bias", "magnitude"}
_NAME = re.compile(
    re.escape(_PREFIX) + r"(?P<path>.+?)\.(?:" + "|".join(f"(?P<{part}>{text})" for part, text in _PARTS) + ")"
)
_RESAVE = "save the adapter with PEFT's save_pretrained"
_RESAVE_WITHOUT = f"{_RESAVE}(save_embedding_layers=False)"
_UNCLAIMED = {
    "lora_bias": "is a bias of a LoRA layer, but lora_bias is not true; make config and weights agree",
    "magnitude": "is a DoRA magnitude, but use_dora is not true; make config and weights agree",
    "rows": "holds trained token rows that trainable_token_indices does not name; make config and weights agree",
    "bias": "is a trained bias that the config does not claim; set bias to all or lora_only, or leave it out",
    "weight": "is a whole matrix of the base that modules_to_save does not name; make config and weights agree",
    "base_weight": f"is a whole matrix of the base; {_RESAVE_WITHOUT}",
}
_STRANGERS = (
    (re.compile(r".*\.lora_([AB]|embedding_[AB])\..+"), f"has an adapter's name inside; {_RESAVE}"),
    (re.compile(r".*\.(lora_[A-Za-z]+|ranknum)"), "does not belong to LoRA; train a LORA adapter"),
    (re.compile(r".*\.modules_to_save\..*"), f"is a second copy of a saved module; {_RESAVE_WITHOUT}"),
    (
        re.compile(r".*\.(original_module|token_adapter\.base_layer)\.weight"),
        f"is a matrix of the base beside what was trained of it; {_RESAVE_WITHOUT}",
    ),
)

_NOT_LORA = f"is not a tensor of LoRA; {_RESAVE}"

Parts = dict[str, TensorRef]
Pair = tuple[TensorRef, TensorRef]


class SameTensor(msgspec.Struct, frozen=True):
    """Two tensors that ensure_weight_tying makes one, so that they must be equal, turned where `is_transposed`."""

    ref: TensorRef
    other: TensorRef
    is_transposed: bool = False


class MatrixCopy(msgspec.Struct, frozen=True):
    """A tensor that has the shape of the base's embedding or head at `path` and must be its copy."""

    path: str
    ref: TensorRef


class Matched(msgspec.Struct, frozen=True):
    """What the tensors of a file are; only meaningful where no check failed. Each list follows the claims' order."""

    modules: tuple[LoraModule, ...] = ()
    weights: tuple[SavedTensor, ...] = ()
    biases: tuple[SavedTensor, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    same: tuple[SameTensor, ...] = ()
    copies: tuple[MatrixCopy, ...] = ()


def match_tensors(
    table: TensorTable,
    settings: LoraSettings,
    targets: Sequence[Target],
    claims: Claims,
    base: BaseSpec,
    findings: Findings,
) -> Matched:
    """Find the tensors of each target and claim, and name every tensor that is missing, foreign or of the wrong shape.

    Adds the checks `unmatched_tensors`, `unpaired_tensors`, `missing_tensors`, `unexpected_tensor`, `shape`,
    `rank_mismatch` and, for dtypes that are not served, `format`.
    """
    found = _Found(table.tensors, base, findings)
    pairs = {target.path: found.take_pair(target) for target in targets}
    same = [both for target in targets for both in _tied_pairs(target, pairs)]
    modules = [
        module for target in targets if (module := _build_module(target, _own_pair(target, pairs), settings, found))
    ]
    weights = [SavedTensor(path, ref) for path in claims.saved if (ref := found.take_weight(path))]
    if claims.saved_tie is not None:
        same += _tied_weights(claims.saved_tie, weights)
    biases = [SavedTensor(path, ref) for path in claims.biases if (ref := found.take_bias(path))]
    rows = _take_rows(claims.rows, found)
    copies = found.judge_rest({target.path for target in targets}, find_unknown_names(settings, base))
    findings.settle("unmatched_tensors", "unpaired_tensors", "missing_tensors", "unexpected_tensor", "shape")
    findings.settle("rank_mismatch")
    return Matched(tuple(modules), tuple(weights), tuple(biases), tuple(rows), tuple(same), tuple(copies))


def find_stranger(table: TensorTable, base: BaseSpec) -> str | None:
    """Return what the first LoRA tensor says that no adapter of the base can have, None if there is none such."""
    for ref in table.tensors:
        found = _NAME.fullmatch(ref.name)
        if found is None or found.lastgroup not in ("lora_A", "lora_B"):
            continue
        path, module = found["path"], base.modules.get(found["path"])
        if module is None:
            return f"the base has no {show(path)}"
        axis, expected = (1, module.in_features) if found.lastgroup == "lora_A" else (0, module.out_features)
        if len(ref.shape) == 2 and ref.shape[axis] != expected:
            side = "takes" if axis else "gives"
            return f"{path} {side} {ref.shape[axis]} features there, and {expected} in the base"
    return None


def judge_whole_matrices(table: TensorTable, base: BaseSpec, findings: Findings) -> None:
    """Only the check `shape` for saved base matrices: what to say where the config itself is refused."""
    for ref in table.tensors:
        found = _NAME.fullmatch(ref.name)
        if found is not None and found.lastgroup in ("weight", "base_weight") and found["path"] in base.modules:
            _judge_matrix_shape(ref, base.modules[found["path"]], base, findings)
    findings.settle("shape")


def judge_rank_limit(ranks: Iterable[int], base: BaseSpec, findings: Findings) -> None:
    """Add the check `rank_limit` for the ranks that the config declares."""
    rank = max(ranks)
    if rank > base.max_lora_rank:
        remedy = "train a smaller rank"
        if rank <= MAX_LORA_RANK:
            remedy += f", or have {base.name} served with --max-lora-rank {rank}"
        message = f"Rank {rank} is above the limit of {base.max_lora_rank} for {base.name}; {remedy}."
        findings.fail("rank_limit", message, "r")
    findings.settle("rank_limit")


def judge_saved_size(matched: Matched, base: BaseSpec, findings: Findings) -> None:
    """Refuse (`field_value`) an adapter whose whole matrices and rows take more than the base allows."""
    refs = [saved.ref for saved in matched.weights] + [rows.ref for rows in matched.token_rows]
    size = sum(ref.stop - ref.start for ref in set(refs))
    if size > base.max_saved_bytes:
        field = "modules_to_save" if matched.weights else "trainable_token_indices"
        message = f"{field} takes {size} bytes, above max_saved_bytes of {base.max_saved_bytes} for {base.name}"
        findings.fail("field_value", f"{message}; save the adapter as bfloat16 or train without it.", field)


class _Found:
    """The tensors of a file by module and part; what was not taken is left over."""

    def __init__(self, refs: Iterable[TensorRef], base: BaseSpec, findings: Findings) -> None:
        self._base = base
        self._findings = findings
        self._parts: dict[str, Parts] = {}
        for ref in refs:
            found = _NAME.fullmatch(ref.name)
            part = found.lastgroup if found is not None else None
            if found is None or part is None or (part not in _LORA_PARTS and found["path"] not in base.modules):
                self._refuse(ref, _describe_stranger(ref.name))
            elif (first := self._parts.setdefault(found["path"], {}).setdefault(part, ref)) is not ref:
                self._refuse(ref, f"says again what {first.name} says; leave out one of both")

    def take_pair(self, target: Target) -> Pair | None:
        """A and B of a target; None where they are missing, which a tied head's may be."""
        module = self._base.modules[target.path]
        is_embedding = module.kind == "embedding"
        parts = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        suffix = "" if is_embedding else ".weight"
        a, b = (self._take(target.path, part) for part in parts)
        names = [f"{_PREFIX}{target.path}.{part}{suffix}" for part in parts]
        if a is None or b is None:
            if a is not None or b is not None:
                absent = names[0] if a is None else names[1]
                message = f"{absent} is missing beside its other half; save both."
                self._findings.fail("unpaired_tensors", message, absent)
            elif target.tied_to is None:
                message = f"The config targets {target.path} but its tensors are missing; save the whole adapter."
                self._findings.fail("missing_tensors", message, names[0])
            return None
        inputs, outputs = module.in_features, module.out_features
        if is_embedding:
            inputs, outputs = outputs, inputs
        self._judge_half(a, target.rank, 1, inputs)
        self._judge_half(b, target.rank, 0, outputs)
        return a, b

    def take_vector(self, path: str, part: str, name: str) -> TensorRef | None:
        """A vector with one entry for each output of an adapted module."""
        module = self._base.modules[path]
        size = module.in_features if module.kind == "embedding" else module.out_features
        return self._take_claimed(path, part, name, (size,))

    def take_weight(self, path: str) -> TensorRef | None:
        """The whole weight of a saved module."""
        ref = self._take(path, "weight")
        if ref is None:
            self._miss(path, "weight")
        elif not _judge_matrix_shape(ref, self._base.modules[path], self._base, self._findings):
            self._judge_dtype(ref)
        return ref

    def take_bias(self, path: str) -> TensorRef | None:
        """The trained bias of a module."""
        return self._take_claimed(path, "bias", "base_layer.bias", (self._base.modules[path].out_features,))

    def take_rows(self, path: str, num_rows: int) -> TensorRef | None:
        """The trained rows of an embedding or head."""
        name = "token_adapter.trainable_tokens_delta"
        return self._take_claimed(path, "rows", name, (num_rows, self._base.modules[path].in_features))

    def judge_rest(self, targeted: Collection[str], unknown: list[str]) -> list[MatrixCopy]:
        """Refuse what was not taken, but for whole matrices that may be copies of the base's.

        `unknown` are names that the config targets and the base lacks: the likely cause of tensors without a target.
        """
        copies = []
        for path, parts in self._parts.items():
            for part, ref in parts.items():
                module = self._base.modules.get(path)
                if part in _LORA_PARTS and path not in targeted:
                    self._refuse_unmatched(path, ref, unknown)
                elif module is None or part not in ("weight", "base_weight"):
                    self._refuse(ref, _UNCLAIMED.get(part, _NOT_LORA))
                elif _judge_matrix_shape(ref, module, self._base, self._findings):
                    continue
                elif module.kind in MATRIX_KINDS:
                    self._judge_dtype(ref)
                    copies.append(MatrixCopy(path, ref))
                else:
                    self._refuse(ref, _UNCLAIMED[part])
        return copies

    def _take(self, path: str, part: str) -> TensorRef | None:
        return self._parts.get(path, {}).pop(part, None)

    def _take_claimed(self, path: str, part: str, name: str, shape: tuple[int, ...]) -> TensorRef | None:
        ref = self._take(path, part)
        if ref is None:
            self._miss(path, name)
            return None
        self._judge_dtype(ref)
        if ref.shape != shape:
            message = f"{ref.name} has shape {list(ref.shape)}, the base needs {list(shape)}; train on this base."
            self._findings.fail("shape", message, ref.name)
        return ref

    def _miss(self, path: str, name: str) -> None:
        name = f"{_PREFIX}{path}.{name}"
        self._findings.fail(
            "missing_tensors", f"The config claims {name} but the file lacks it; save the whole adapter.", name
        )

    def _judge_half(self, ref: TensorRef, rank: int, axis: int, features: int) -> None:
        """`axis` is where the base's features lie; the other axis is the rank."""
        self._judge_dtype(ref)
        expected = [rank, features] if axis == 1 else [features, rank]
        if len(ref.shape) != 2 or ref.shape[axis] != features:
            message = f"{ref.name} has shape {list(ref.shape)}, the base needs {expected}; train on this base."
            self._findings.fail("shape", message, ref.name)
        elif ref.shape[1 - axis] != rank:
            message = f"{ref.name} has rank {ref.shape[1 - axis]} but the config says {rank}; make both agree."
            self._findings.fail("rank_mismatch", message, ref.name)

    def _judge_dtype(self, ref: TensorRef) -> None:
        if ref.dtype not in SERVED_DTYPES:
            message = f"{ref.name} is stored as {ref.dtype}; save the adapter as float32, float16 or bfloat16."
            self._findings.fail("format", message, ref.name)

    def _refuse_unmatched(self, path: str, ref: TensorRef, unknown: list[str]) -> None:
        what = "is not targeted by the config" if path in self._base.modules else "is not a module of the base"
        cause = f": target_modules names {listed(unknown)}, which the base lacks" if unknown else ""
        message = f"{show(path)} {what}, so its tensor would be ignored; make config and weights agree{cause}."
        self._findings.fail("unmatched_tensors", message, ref.name)

    def _refuse(self, ref: TensorRef, what: str) -> None:
        self._findings.fail("unexpected_tensor", f"{show(ref.name)} {what}.", ref.name)


def _own_pair(target: Target, pairs: Mapping[str, Pair | None]) -> Pair | None:
    """A and B of a target, those of its embedding for a tied head: its A is the embedding's B turned, its B the A."""
    if target.tied_to is None:
        return pairs[target.path]
    shared = pairs.get(target.tied_to)
    return None if shared is None else (shared[1], shared[0])


def _tied_pairs(target: Target, pairs: Mapping[str, Pair | None]) -> list[SameTensor]:
    """What must be equal where a tied head has tensors of its own beside the embedding's."""
    shared, own = _own_pair(target, pairs), pairs[target.path]
    if target.tied_to is None or shared is None or own is None:
        return []
    return [SameTensor(ref, other, is_transposed=True) for ref, other in zip(own, shared, strict=True)]


def _tied_weights(tie: Tie, weights: Iterable[SavedTensor]) -> list[SameTensor]:
    refs = {saved.path: saved.ref for saved in weights}
    if not {tie.head, tie.embedding} <= refs.keys():
        return []
    return [SameTensor(refs[tie.head], refs[tie.embedding])]


def _build_module(target: Target, pair: Pair | None, settings: LoraSettings, found: _Found) -> LoraModule | None:
    magnitude = found.take_vector(target.path, "magnitude", "lora_magnitude_vector") if settings.use_dora else None
    bias = found.take_vector(target.path, "lora_bias", "lora_B.bias") if settings.lora_bias else None
    if pair is None:
        return None
    is_transposed = target.tied_to is not None
    return LoraModule(target.path, target.rank, target.scaling, *pair, magnitude, bias, is_transposed)


def _take_rows(claims: Iterable[RowClaim], found: _Found) -> list[TokenRows]:
    """The rows of each claim; those of a tied head are the embedding's, which comes first or stands alone."""
    sources = {claim.source: len(claim.token_ids) for claim in claims}
    refs = {source: found.take_rows(source, num_rows) for source, num_rows in sources.items()}
    return [TokenRows(claim.path, claim.token_ids, ref) for claim in claims if (ref := refs[claim.source])]


def _judge_matrix_shape(ref: TensorRef, module: ModuleSpec, base: BaseSpec, findings: Findings) -> bool:
    """Whether a whole weight has another shape than the base's, as a resized vocabulary leaves it."""
    expected = (module.out_features,) if module.kind == "norm" else (module.out_features, module.in_features)
    if ref.shape == expected:
        return False
    rows = f" (the base's vocabulary has {base.vocab_size} rows)" if module.kind in MATRIX_KINDS else ""
    message = f"{show(ref.name)} has shape {list(ref.shape)}, the base {list(expected)}{rows}; train on this base."
    findings.fail("shape", message, ref.name)
    return True


def _describe_stranger(name: str) -> str:
    described = next((what for pattern, what in _STRANGERS if pattern.fullmatch(name)), None)
    if described is not None:
        return described
    return _NOT_LORA if name.startswith(_PREFIX) else f"does not start with {_PREFIX}; {_RESAVE}"
