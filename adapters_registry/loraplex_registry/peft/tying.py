"""What a config means on a base whose head shares the embedding's matrix, as PEFT 0.21 does it.

The sharing ends where an adapter changes one of the two, unless `ensure_weight_tying` carries the change over. PEFT
decides by names whether it does; so does this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.pattern import Pattern, match_patterns
from loraplex_registry.peft.spec import BaseSpec, ModuleKind

_KNOWN_NAMES = ("embed_tokens", "lm_head")


class Tie(msgspec.Struct, frozen=True):
    """The paths of a base's embedding and of the head that shares its matrix."""

    embedding: str
    head: str


def find_tie(base: BaseSpec) -> Tie | None:
    """The tie of a base, or None where each has its own matrix."""
    head, embedding = find_kind(base, "head"), find_kind(base, "embedding")
    return Tie(embedding, head) if head and embedding and base.modules[head].tied else None


def find_kind(base: BaseSpec, kind: ModuleKind) -> str | None:
    """The path of the base's only module of this kind."""
    paths = [path for path, module in base.modules.items() if module.kind == kind]
    return paths[0] if len(paths) == 1 else None


def find_saved_tie(settings: LoraSettings, base: BaseSpec) -> Tie | None:
    """The tie, if it carries a whole saved embedding over to the head."""
    is_tied = settings.ensure_weight_tying and _names_known(settings.modules_to_save)
    return find_tie(base) if is_tied else None


def find_target_tie(settings: LoraSettings, base: BaseSpec) -> Tie | None:
    """The tie, if it carries LoRA of the embedding over to the head.

    Raises:
        PatternError: `target_modules` is no usable expression.
    """
    if not settings.ensure_weight_tying or find_saved_tie(settings, base) is not None:
        return None
    wanted = settings.target_modules or ()
    if isinstance(wanted, str):
        is_tied = bool(match_patterns([Pattern(wanted, wanted, is_full=True)], _KNOWN_NAMES)[0])
    else:
        is_tied = _names_known(wanted)
    return find_tie(base) if is_tied else None


def list_saved_names(settings: LoraSettings, base: BaseSpec) -> tuple[str, ...]:
    """`modules_to_save` as PEFT rewrites it: under a tie it takes in the embedding and not the head's name."""
    tie = find_saved_tie(settings, base)
    if tie is None:
        return settings.modules_to_save
    names = [*settings.modules_to_save, tie.embedding]
    taken = next((name for name in names if re.match(rf"(^|.*\.){name}($|\..*)", tie.head)), None)
    return tuple(name for i, name in enumerate(names) if taken is None or i != names.index(taken))


def _names_known(names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[2] in _KNOWN_NAMES for name in names)
