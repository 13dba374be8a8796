"""What a team brings to show that its LoRA falls short, and what follows from it. Pure.

A metric may be better high or low: which, the target says by lying above or below the base.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgspec

from loraplex.errors import InvalidRequestError
from loraplex_registry.wire.digest import DIGEST_PATTERN

MAX_RANKS = 32
_DIGEST = re.compile(DIGEST_PATTERN)
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]


class RankTried(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A rank that was trained, and what the metric was with it."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    value: float


class Evidence(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An evaluation: which one, on which data, and the metric for the base, the LoRA, and what is needed."""

    evaluation: str
    data_digest: str
    num_samples: _Positive
    metric: str
    base: float
    lora: float
    target: float
    ranks_tried: list[RankTried]


def judge_evidence(evidence: Evidence) -> dict[str, Any]:
    """Return the gap that the evidence shows.

    Returns:
        `higher_is_better`; `gap`, what lies between base and target; `closed`, the share of it that the LoRA closes;
        `best_rank` and `best_value` of those tried; `gain_of_last_rank`, the share of the gap that the highest rank
        closed beyond the one before it, None if only one was tried.

    Raises:
        InvalidRequestError: A number is none, or the evidence shows that there is nothing to escalate.
    """
    _check_form(evidence)
    gap = evidence.target - evidence.base
    if gap == 0:
        raise InvalidRequestError("evidence.target is what the base reaches already", param="evidence.target")
    if (evidence.target - evidence.lora) / gap <= 0:
        raise InvalidRequestError(
            "evidence.lora reaches the target: there is nothing that a full fine-tune is needed for",
            param="evidence.lora",
        )
    by_rank = sorted(evidence.ranks_tried, key=lambda tried: tried.rank)
    best = max(by_rank, key=lambda tried: (tried.value / gap, -tried.rank))
    if (evidence.target - best.value) / gap <= 0:
        raise InvalidRequestError(
            f"rank {best.rank} reaches the target: upload that LoRA instead", param="evidence.ranks_tried"
        )
    return {
        "higher_is_better": gap > 0,
        "gap": abs(gap),
        "closed": _share(evidence.lora - evidence.base, gap),
        "best_rank": best.rank,
        "best_value": best.value,
        "gain_of_last_rank": _share(by_rank[-1].value - by_rank[-2].value, gap) if len(by_rank) > 1 else None,
    }


def _check_form(evidence: Evidence) -> None:
    if _DIGEST.fullmatch(evidence.data_digest) is None:
        raise InvalidRequestError(
            "evidence.data_digest is 'sha256:' and 64 lower-case hex digits of the evaluation's data",
            param="evidence.data_digest",
        )
    numbers = {"base": evidence.base, "lora": evidence.lora, "target": evidence.target}
    for name, value in numbers.items():
        if not math.isfinite(value) or abs(value) > 1e15:
            raise InvalidRequestError(f"evidence.{name} is not a number of ordinary size", param=f"evidence.{name}")
    ranks = [tried.rank for tried in evidence.ranks_tried]
    values_are_good = all(math.isfinite(tried.value) and abs(tried.value) <= 1e15 for tried in evidence.ranks_tried)
    if not 1 <= len(ranks) <= MAX_RANKS or len(set(ranks)) < len(ranks) or not values_are_good:
        raise InvalidRequestError(
            f"evidence.ranks_tried holds 1 to {MAX_RANKS} different ranks, each with its value",
            param="evidence.ranks_tried",
        )


def _share(part: float, gap: float) -> float:
    return round(part / gap, 6)
