"""What an adapter's config claims beside A and B: whole modules, rows of tokens and biases, exactly as PEFT 0.21.

Names are matched as PEFT does: `modules_to_save` and the keys of `trainable_token_indices` by the ending of a module's
path. A module that two fields change, or that cannot be replaced for one request among others, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.findings import Findings, listed, show
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.target import Target, list_paths, natural_order
from loraplex_registry.peft.tying import Tie, find_kind, find_saved_tie, find_tie, list_saved_names

_REPLACEABLE = ("norm", "embedding", "head")
_MATRICES = ("embedding", "head")


class RowClaim(msgspec.Struct, frozen=True):
    """Trained rows of the module at `path`, whose tensor stands under `source`."""

    path: str
    source: str
    token_ids: tuple[int, ...]


class Claims(msgspec.Struct, frozen=True):
    """Paths of whole saved modules, trained rows, and paths whose trained bias replaces the base's.

    `saved_tie`: the saved head must be the saved embedding, which it is tied to.
    """

    saved: tuple[str, ...] = ()
    rows: tuple[RowClaim, ...] = ()
    biases: tuple[str, ...] = ()
    saved_tie: Tie | None = None


def judge_claims(settings: LoraSettings, targets: Sequence[Target], base: BaseSpec, findings: Findings) -> Claims:
    """Resolve the claims, and refuse those that have no meaning here (`field_unsupported`, `field_value`)."""
    saved = _claim_saved(settings, base, findings)
    rows = _claim_rows(settings, base, findings)
    claims = Claims(saved, rows, _claim_biases(settings, targets, base), find_saved_tie(settings, base))
    _judge_overlaps(claims, targets, findings)
    if any(token >= base.vocab_size for token in settings.alora_invocation_tokens):
        message = "alora_invocation_tokens holds a token that the base lacks, so it is never found; train without it."
        findings.fail("field_value", message, "alora_invocation_tokens")
    return claims


def _claim_saved(settings: LoraSettings, base: BaseSpec, findings: Findings) -> tuple[str, ...]:
    known, found = list_paths(base), set()
    for name in list_saved_names(settings, base):
        paths = _match_ending(name, known)
        if not paths:
            _refuse_saved(name, "is not a module of the base", findings)
        for path in paths:
            if _is_replaceable(path, base):
                found.add(path)
            else:
                _refuse_saved(path, "cannot be replaced for one adapter alone", findings)
    tie = find_saved_tie(settings, base)
    if tie is not None and tie.head in found:
        message = f"{tie.head} is saved on its own and tied at once by ensure_weight_tying; drop one."
        findings.fail("field_value", message, "modules_to_save")
    return _in_order(found | {tie.head} if tie is not None else found)


def _is_replaceable(path: str, base: BaseSpec) -> bool:
    module = base.modules.get(path)
    return module is not None and module.kind in _REPLACEABLE and not module.has_bias


def _refuse_saved(path: str, what: str, findings: Findings) -> None:
    message = f"modules_to_save takes in {path}, which {what}; save only norms, the embedding and the head."
    findings.fail("field_unsupported", message, "modules_to_save")


def _claim_rows(settings: LoraSettings, base: BaseSpec, findings: Findings) -> tuple[RowClaim, ...]:
    indices = settings.trainable_token_indices
    if not indices:
        return ()
    if not isinstance(indices, dict):
        indices = {find_kind(base, "embedding") or "embed_tokens": indices}
    known = list_paths(base)
    path_to_key: dict[str, str] = {}
    for key in indices:
        path = _find_matrix(key, known, base, findings)
        if path in path_to_key:
            _fail_rows(f"{show(path_to_key[path])} and {show(key)} are one module; name it once", findings)
        elif path is not None:
            path_to_key[path] = key
    claims = {path: RowClaim(path, path, indices[key]) for path, key in path_to_key.items()}
    for claim in claims.values():
        _judge_token_ids(claim, base, findings)
    tie = find_tie(base)
    if tie is not None and tie.embedding in claims:
        _tie_rows(claims, tie, path_to_key.get(tie.head), settings, findings)
    return tuple(claims[path] for path in _in_order(claims))


def _tie_rows(
    claims: dict[str, RowClaim], tie: Tie, head_key: str | None, settings: LoraSettings, findings: Findings
) -> None:
    """The embedding's rows are the head's too, unless the head has its own under other ids or another name."""
    ids = claims[tie.embedding].token_ids
    own = claims.get(tie.head)
    if own is not None and own.token_ids != ids and settings.ensure_weight_tying:
        _fail_rows("the tied modules have different token ids, which PEFT refuses; make them equal", findings)
    elif own is None or (own.token_ids == ids and head_key == tie.head):
        claims[tie.head] = RowClaim(tie.head, tie.embedding, ids)


def _find_matrix(key: str, known: Sequence[str], base: BaseSpec, findings: Findings) -> str | None:
    paths = _match_ending(key, known)
    if len(paths) == 1 and paths[0] in base.modules and base.modules[paths[0]].kind in _MATRICES:
        return paths[0]
    _fail_rows(f"{show(key)} is not the embedding or the head alone; name one of them", findings)
    return None


def _judge_token_ids(claim: RowClaim, base: BaseSpec, findings: Findings) -> None:
    outside = [token for token in claim.token_ids if token >= base.modules[claim.path].out_features]
    if outside:
        _fail_rows(f"the base has no token {listed([str(token) for token in outside])}; train without it", findings)


def _fail_rows(message: str, findings: Findings) -> None:
    findings.fail("field_value", f"trainable_token_indices: {message}.", "trainable_token_indices")


def _claim_biases(settings: LoraSettings, targets: Sequence[Target], base: BaseSpec) -> tuple[str, ...]:
    if settings.bias == "none":
        return ()
    paths = base.modules if settings.bias == "all" else [target.path for target in targets]
    return _in_order(path for path in paths if base.modules[path].has_bias)


def _judge_overlaps(claims: Claims, targets: Sequence[Target], findings: Findings) -> None:
    target_paths = {target.path for target in targets}
    row_paths = {claim.path for claim in claims.rows}
    pairs = (
        ("target_modules", target_paths, "modules_to_save", set(claims.saved)),
        ("target_modules", target_paths, "trainable_token_indices", row_paths),
        ("modules_to_save", set(claims.saved), "trainable_token_indices", row_paths),
    )
    for one, left, other, right in pairs:
        for path in _in_order(left & right):
            message = f"{path} is changed by {one} and by {other}, which is not served; leave it to one of them."
            findings.fail("field_value", message, other)


def _match_ending(name: str, paths: Iterable[str]) -> list[str]:
    """The paths that end so, whether or not at a dot."""
    return [path for path in paths if path.endswith(name)]


def _in_order(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(paths, key=natural_order))
