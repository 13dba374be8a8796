"""Which modules of a base an adapter's config puts under LoRA, and with which rank and scaling, exactly as PEFT 0.21.

Pure functions of settings and `BaseSpec`; the tensors are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.errors import PatternError
from loraplex_registry.peft.findings import Findings, listed, show
from loraplex_registry.peft.pattern import Matches, Pattern, match_patterns
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.tying import Tie, find_target_tie, list_saved_names

ALL_LINEAR = "all-linear"

_DEFAULT_TARGETS = ("q_proj", "v_proj")
_DEFAULT_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Target(msgspec.Struct, frozen=True):
    """One module under LoRA as the config asks for it; scaling = alpha / rank, or alpha / sqrt(rank) with rsLoRA.

    `tied_to` is the embedding whose two matrices a tied head shares, the other way round. Its `rank` is theirs; its
    scaling is what the patterns say of the head itself.
    """

    path: str
    rank: int
    alpha: float
    scaling: float
    tied_to: str | None = None


class ResolvedPattern(msgspec.Struct, frozen=True):
    """What a pattern says: the value of each path that a key matches, and whether its keys' order decides any."""

    path_to_value: dict[str, Any]
    is_ordered: bool


class Resolution(msgspec.Struct, frozen=True):
    """The targets of a config in natural order of their paths, and the patterns that gave their ranks and alphas."""

    targets: tuple[Target, ...]
    ranks: ResolvedPattern
    alphas: ResolvedPattern


def judge_targets(settings: LoraSettings, base: BaseSpec, findings: Findings) -> Resolution | None:
    """Resolve the targets and add the check `target_modules`, and `field_value` for what does not go with a target.

    Returns:
        The resolution, or None where an expression cannot be used or nothing that can be adapted is targeted.
    """
    try:
        paths = find_target_paths(settings, base)
        _judge_paths(paths, settings, base, findings)
        findings.settle("target_modules")
        adapted = [path for path in paths if _is_adaptable(path, base)]
        return resolve_targets(settings, adapted, find_target_tie(settings, base)) if adapted else None
    except PatternError as error:
        field = _field_of(error.source, settings)
        check = "target_modules" if field == "target_modules" else "field_value"
        message = f"{field} holds the expression {show(error.source)}, but {error.reason}; list the modules by name."
        findings.fail(check, message, field)
        return None


def find_target_paths(settings: LoraSettings, base: BaseSpec) -> list[str]:
    """Paths of all modules that PEFT would wrap, or fail on: containers such as `model.layers.0.mlp` are included.

    Raises:
        PatternError: a regular expression is invalid or too slow.
    """
    names = list_paths(base)
    excluded = _match_names(settings.exclude_modules or (), names) | _saved_names(settings, base, names)
    wanted = settings.target_modules if settings.target_modules is not None else _default_targets(base)
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        found = {path for path, module in base.modules.items() if module.kind == "linear"}
    else:
        found = _match_names(wanted, names)
        if not isinstance(wanted, str) and settings.layers_to_transform is not None:
            found &= set(wanted) | _in_layers(settings, names)
    tie = find_target_tie(settings, base)
    found = (found - excluded) if tie is None else (found | {tie.embedding}) - excluded | {tie.head}
    return [name for name in names if name in found]


def list_paths(base: BaseSpec) -> list[str]:
    """Paths of all modules of the base in natural order, containers such as `model.layers.0.mlp` included."""
    return sorted({*base.modules, *_containers(base.modules)}, key=natural_order)


def resolve_targets(settings: LoraSettings, paths: Sequence[str], tie: Tie | None = None) -> Resolution:
    """Rank, alpha and scaling of each path: the first matching key of a pattern wins, else the default.

    Args:
        settings: the honoured fields.
        paths: what `find_target_paths` found.
        tie: the head of this tie takes the rank and the matrices of its embedding.

    Raises:
        PatternError: a key is not a usable regular expression.
    """
    ranks = resolve_pattern(settings.rank_pattern, paths)
    alphas = resolve_pattern(settings.alpha_pattern, paths)
    targets = [
        _build_target(
            path,
            ranks.path_to_value.get(path, settings.r),
            alphas.path_to_value.get(path, settings.lora_alpha),
            is_rslora=settings.use_rslora,
        )
        for path in paths
    ]
    if tie is not None:
        rank = ranks.path_to_value.get(tie.embedding, settings.r)
        targets = [
            msgspec.structs.replace(target, rank=rank, tied_to=tie.embedding) if target.path == tie.head else target
            for target in targets
        ]
    return Resolution(tuple(targets), ranks, alphas)


def resolve_pattern(pattern: dict[str, Any], paths: Sequence[str]) -> ResolvedPattern:
    r"""Match `(.*\.)?(KEY)$` from the start of each path, in the pattern's order.

    Raises:
        PatternError: a key is not a usable regular expression.
    """
    keys = [Pattern(key, rf"(.*\.)?({key})$") for key in pattern]
    key_to_matches = dict(zip(pattern, match_patterns(keys, paths), strict=True))
    resolved = _first_values(pattern, pattern, key_to_matches)
    return ResolvedPattern(resolved, resolved != _first_values(sorted(pattern), pattern, key_to_matches))


def _first_values(order: Iterable[str], pattern: dict[str, Any], key_to_matches: dict[str, Matches]) -> dict[str, Any]:
    resolved: dict[str, Any] = {}
    for key in order:
        for path in key_to_matches[key]:
            resolved.setdefault(path, pattern[key])
    return resolved


def natural_order(path: str) -> list[tuple[int, int, str]]:
    """A sort key under which layer 10 follows layer 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]


def _build_target(path: str, rank: int, alpha: float, *, is_rslora: bool) -> Target:
    return Target(path, rank, alpha, alpha / (math.sqrt(rank) if is_rslora else rank))


def _containers(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        above = path.rpartition(".")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition(".")[0]
    return found


def _default_targets(base: BaseSpec) -> tuple[str, ...]:
    return _DEFAULT_TARGETS if base.architecture in _DEFAULT_ARCHITECTURES else ()


def _match_names(wanted: str | tuple[str, ...], names: Sequence[str]) -> set[str]:
    """A string is one expression for the whole path; a list holds whole paths or their last parts."""
    if isinstance(wanted, str):
        return set(match_patterns([Pattern(wanted, wanted, is_full=True)], names)[0])
    ends = set(wanted)
    return {name for name in names if any(ending in ends for ending in _endings(name))} if ends else set()


def _saved_names(settings: LoraSettings, base: BaseSpec, names: Sequence[str]) -> set[str]:
    """Names that `modules_to_save` takes out of the targets: PEFT matches them and all below as expressions."""
    saved = list_saved_names(settings, base)
    matches = match_patterns([Pattern(name, rf"(^|.*\.){name}($|\..*)") for name in saved], names)
    return {name for found in matches for name in found}


def _is_adaptable(path: str, base: BaseSpec) -> bool:
    return path in base.modules and base.modules[path].kind != "norm"


def _endings(name: str) -> Iterator[str]:
    yield name
    start = name.find(".") + 1
    while start:
        yield name[start:]
        start = name.find(".", start) + 1


def _in_layers(settings: LoraSettings, names: Sequence[str]) -> set[str]:
    """Names whose layer index, as the first matching pattern sees it, is one of `layers_to_transform`."""
    patterns = [Pattern(source, rf"(?:^|.*?\.){source}\.(?P<idx>\d+)\.") for source in settings.layers_pattern]
    found = match_patterns(patterns or [Pattern("", r".*?\.[^.]*\.(?P<idx>\d+)\.")], names)
    layers = set(settings.layers_to_transform or ())
    return {name for name in names if _layer_of(name, found) in layers}


def _layer_of(name: str, found: Sequence[Matches]) -> int | None:
    index = next((matches[name] for matches in found if name in matches), "")
    return int(index) if index.isdecimal() else None


def _judge_paths(paths: Sequence[str], settings: LoraSettings, base: BaseSpec, findings: Findings) -> None:
    for path in paths:
        if not _is_adaptable(path, base):
            message = f"target_modules takes in {path}, which is not a linear layer; name linear layers only."
            findings.fail("target_modules", message, path)
        elif base.modules[path].kind == "embedding":
            _judge_embedding(path, settings, findings)
    tie = find_target_tie(settings, base)
    if tie is not None and tie.embedding not in paths:
        message = f"ensure_weight_tying needs {tie.embedding} under LoRA, and it is excluded; drop one of both."
        findings.fail("field_value", message, "ensure_weight_tying")
    unknown = find_unknown_names(settings, base)
    if not paths:
        _refuse_empty(unknown, settings, base, findings)
    elif unknown:
        message = f"The base has no module {listed(unknown)}; PEFT ignores such names, and so does this platform."
        findings.warn("target_modules", message, "target_modules")


def _judge_embedding(path: str, settings: LoraSettings, findings: Findings) -> None:
    for field in ("lora_bias", "alora_invocation_tokens"):
        if getattr(settings, field):
            findings.fail("field_value", f"PEFT has no {field} on {path}; leave it out of target_modules.", field)


def find_unknown_names(settings: LoraSettings, base: BaseSpec) -> list[str]:
    """Names in the list `target_modules` that mean no module of the base, in order."""
    wanted = settings.target_modules
    if wanted is None or isinstance(wanted, str):
        return []
    unknown = set(wanted)
    for path in (*base.modules, *_containers(base.modules)):
        unknown.difference_update(_endings(path))
        if not unknown:
            break
    return sorted(unknown)


def _refuse_empty(unknown: list[str], settings: LoraSettings, base: BaseSpec, findings: Findings) -> None:
    accepted = listed(sorted({path.rpartition(".")[2] for path, m in base.modules.items() if m.kind == "linear"}), 16)
    said = f"the base has no module {listed(unknown)}" if unknown else f"{show(_plain(settings))} matches no module"
    findings.fail(
        "target_modules", f"target_modules: {said}; use some of {accepted}, and train again.", "target_modules"
    )


def _plain(settings: LoraSettings) -> object:
    wanted = settings.target_modules
    return list(wanted) if isinstance(wanted, tuple) else wanted


def _field_of(source: str, settings: LoraSettings) -> str:
    """The field that a refused expression came from."""
    if source == settings.target_modules:
        return "target_modules"
    for field in ("exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"):
        value = getattr(settings, field)
        if source == value or (not isinstance(value, str) and source in (value or ())):
            return field
    return "target_modules"
