"""Judges an adapter's files against a base: the one door for registry, engine and command line.

`check_adapter` reads each file at most once per purpose, in bounded memory, never unpickles and never raises for what
the files hold. The order of its calls is the order in which a team should mend things.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from loraplex_registry.peft.base_rule import judge_base_name
from loraplex_registry.peft.claim import judge_claims
from loraplex_registry.peft.config import AdapterConfig, LoraSettings, judge_config
from loraplex_registry.peft.copy_rule import judge_copies, judge_same
from loraplex_registry.peft.digest import TensorHash, canonical_config, canonical_digest
from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.file_rule import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    TEMPLATE_FILE,
    WEIGHTS_FILE,
    check_names,
    judge_names,
    judge_sizes,
)
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.header import TensorTable, read_open_header
from loraplex_registry.peft.magic import PEEK_BYTES, find_foreign_format, judge_side_files
from loraplex_registry.peft.report import Report, build_report
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, LoraModule, TensorRef
from loraplex_registry.peft.target import judge_targets
from loraplex_registry.peft.template_rule import judge_template
from loraplex_registry.peft.tensor_rule import (
    Matched,
    find_stranger,
    judge_rank_limit,
    judge_saved_size,
    judge_whole_matrices,
    match_tensors,
)
from loraplex_registry.peft.tensor_scan import scan_tensors

__all__ = ["check_adapter", "check_names"]


def check_adapter(
    files: Mapping[str, Path],
    base: BaseSpec,
    *,
    forced_base: bool = False,
    tolerated: Collection[str] = (),
    renders_template: bool = True,
    threads: int = 1,
) -> tuple[Report, AdapterPlan | None]:
    """Judge an adapter.

    Args:
        files: the folder's files by name; the paths may lie anywhere and are only read.
        base: the base that the adapter is for; its `max_lora_rank` is the limit that holds.
        forced_base: an administrator named the base, so a config of another name is only a warning.
        tolerated: checks that may fail and the plan is built all the same; for test hooks only.
        renders_template: try the adapter's chat template; who renders each chat within limits anyway need not.
        threads: at most so many read the tensors.

    Returns:
        The report, and the plan for serving the adapter; the plan is None exactly where a check failed that is not
        tolerated.

    Raises:
        OSError: a file cannot be read, or no helper process can be started; says nothing about the adapter.
    """
    findings = Findings()
    judge_names(list(files), findings)
    judge_sizes(files, findings)
    judge_side_files(files, findings)
    judge_template(files, findings, is_rendered=renders_template)
    config = _judge_config_file(files.get(CONFIG_FILE), findings)
    if config is not None:
        judge_base_name(
            config.base_name,
            base,
            findings,
            forced=forced_base,
            find_stranger=lambda: _find_stranger(files.get(WEIGHTS_FILE), base),
        )
    plan = _judge_weights_file(files, config, base, findings, threads)
    is_refused = any(check.verdict == "fail" and check.name not in tolerated for check in findings.checks())
    report = build_report(
        findings.checks(), honoured=_honoured(config, plan), refused=config.refused if config is not None else {}
    )
    return report, None if is_refused else plan


def _judge_config_file(path: Path | None, findings: Findings) -> AdapterConfig | None:
    if path is None:
        return None
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    return judge_config(data, findings) if len(data) <= MAX_CONFIG_BYTES else None


def _find_stranger(path: Path | None, base: BaseSpec) -> str | None:
    """Say why the weights can be no adapter of the base; what is wrong with the file itself is told elsewhere."""
    if path is None:
        return None
    with path.open("rb") as file:
        if find_foreign_format(file.read(PEEK_BYTES)):
            return None
        try:
            return find_stranger(read_open_header(file, WEIGHTS_FILE), base)
        except AdapterFileError:
            return None


def _judge_weights_file(
    files: Mapping[str, Path], config: AdapterConfig | None, base: BaseSpec, findings: Findings, threads: int
) -> AdapterPlan | None:
    path = files.get(WEIGHTS_FILE)
    settings = config.settings if config is not None else None
    if path is None:
        _judge_declared_rank(settings, base, findings)
        return None
    with path.open("rb") as file:
        table = _judge_header(file, findings)
        if table is None or settings is None or findings.has_failed("base_mismatch"):
            _judge_declared_rank(settings, base, findings)
            return None
        judged = _judge_structure(table, settings, base, findings)
        if judged is None or findings.has_failed():
            return None
        canonical, matched = judged
        hashes, zeros = _scan_tensors(file, table, findings, threads)
        _judge_effect(matched, zeros, findings)
        dropped = _judge_equal_tensors(file, matched, hashes, base, findings)
    kept = [tensor for tensor in hashes if tensor.name not in dropped]
    digest = canonical_digest(
        base.fingerprint, canonical, kept, template_sha256=_hash_template(files.get(TEMPLATE_FILE))
    )
    return _build_plan(digest, canonical, settings, matched, base, dropped)


def _judge_header(file: BinaryIO, findings: Findings) -> TensorTable | None:
    foreign = find_foreign_format(file.read(PEEK_BYTES))
    for check, message in foreign:
        findings.fail(check, message, WEIGHTS_FILE)
    if foreign:
        return None
    try:
        table = read_open_header(file, WEIGHTS_FILE)
    except AdapterFileError as error:
        findings.fail_with(error)
        return None
    findings.settle("lfs_pointer", "format", "header", "truncated")
    return table


def _judge_structure(
    table: TensorTable, settings: LoraSettings, base: BaseSpec, findings: Findings
) -> tuple[dict[str, Any], Matched] | None:
    """Everything that config, header and base say together: the canonical config, and what the tensors are."""
    resolution = judge_targets(settings, base, findings)
    targets = resolution.targets if resolution is not None else ()
    judge_rank_limit([target.rank for target in targets] or [settings.r], base, findings)
    if resolution is None or findings.has_failed("target_modules"):
        return None
    claims = judge_claims(settings, targets, base, findings)
    if findings.has_failed("field_unsupported", "field_value"):
        judge_whole_matrices(table, base, findings)
        return None
    matched = match_tensors(table, settings, targets, claims, base, findings)
    judge_saved_size(matched, base, findings)
    return canonical_config(settings, resolution, claims), matched


def _judge_declared_rank(settings: LoraSettings | None, base: BaseSpec, findings: Findings) -> None:
    if settings is not None:
        judge_rank_limit([settings.r], base, findings)


def _scan_tensors(
    file: BinaryIO, table: TensorTable, findings: Findings, threads: int
) -> tuple[list[TensorHash], set[str]]:
    """What the bytes of the tensors are, and the names of those that hold nothing but zeros."""
    try:
        scans = scan_tensors(file.fileno(), table.tensors, threads)
    except AdapterFileError as error:
        findings.fail_with(error)
        return [], set()
    for ref, scan in zip(table.tensors, scans, strict=True):
        if not scan.is_finite:
            message = f"{ref.name} holds NaN or infinity; train again or repair the checkpoint."
            findings.fail("non_finite", message, ref.name)
        elif narrow := scan.describe_range():
            findings.warn("non_finite", f"{ref.name} {narrow}; see whether training went well.", ref.name)
    findings.settle("non_finite")
    found = list(zip(table.tensors, scans, strict=True))
    return [TensorHash.of(ref, scan.sha256) for ref, scan in found], {ref.name for ref, scan in found if scan.is_zero}


def _judge_effect(matched: Matched, zeros: Collection[str], findings: Findings) -> None:
    """Warn of an adapter that changes nothing, as one is before its first step: its B matrices are zero."""
    is_plain = not (matched.weights or matched.biases or matched.token_rows)
    if is_plain and all(_is_idle(module, zeros) for module in matched.modules):
        message = "All deltas are zero, so answers are the base's; see whether what was saved is what was trained."
        findings.warn("non_finite", message, WEIGHTS_FILE)


def _is_idle(module: LoraModule, zeros: Collection[str]) -> bool:
    has_bias = module.bias is not None and module.bias.name not in zeros
    return module.magnitude is None and not has_bias and (module.a.name in zeros or module.b.name in zeros)


def _judge_equal_tensors(
    file: BinaryIO, matched: Matched, hashes: list[TensorHash], base: BaseSpec, findings: Findings
) -> tuple[str, ...]:
    """Judge what must equal another tensor or the base's; returns the copies that nobody needs."""
    if findings.has_failed("truncated"):
        return ()
    name_to_sha256 = {tensor.name: tensor.sha256 for tensor in hashes}
    judge_same(matched.same, name_to_sha256, file, findings)
    return judge_copies(matched.copies, name_to_sha256, base, findings)


def _hash_template(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _build_plan(
    digest: str,
    config: dict[str, Any],
    settings: LoraSettings,
    matched: Matched,
    base: BaseSpec,
    dropped: tuple[str, ...],
) -> AdapterPlan:
    modules = matched.modules
    return AdapterPlan(
        digest=digest,
        base_fingerprint=base.fingerprint,
        config=config,
        rank=max(module.rank for module in modules),
        target_modules=tuple(sorted({module.path.rpartition(".")[2] for module in modules})),
        num_parameters=sum(math.prod(ref.shape) for ref in _effective_tensors(matched).values()),
        modules=modules,
        weights=matched.weights,
        biases=matched.biases,
        token_rows=matched.token_rows,
        invocation_ids=settings.alora_invocation_tokens,
        dropped=dropped,
    )


def _effective_tensors(matched: Matched) -> dict[str, TensorRef]:
    """Every tensor that takes effect, once, by name."""
    refs = [ref for module in matched.modules for ref in (module.a, module.b, module.magnitude, module.bias)]
    refs += [saved.ref for saved in (*matched.weights, *matched.biases)] + [rows.ref for rows in matched.token_rows]
    return {ref.name: ref for ref in refs if ref is not None}


def _honoured(config: AdapterConfig | None, plan: AdapterPlan | None) -> dict[str, Any]:
    if plan is not None:
        return plan.config
    settings = config.settings if config is not None else None
    return msgspec.to_builtins(settings) if settings is not None else {}
