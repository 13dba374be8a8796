"""What a client is told whose request has no room. Pure."""

from __future__ import annotations

from loraplex.errors import QuotaExceededError, RateLimitExceededError
from loraplex.quotas.quota import Quota, Refusal
from loraplex.quotas.standing import build_headers

_KIND_TO_WORDS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_requests": "requests at once",
    "tokens_per_day": "tokens a day",
    "tokens_per_month": "tokens a month",
}
_MINUTE_S = 60
_NO_RETRY = {"x-should-retry": "false"}


def build_refusal(refusal: Refusal) -> RateLimitExceededError | QuotaExceededError:
    """Return the error; `Retry-After` is the least whole number of seconds that helps."""
    quota = refusal.quota
    standing = next(
        standing
        for charge, standing in zip(refusal.charges, refusal.standings, strict=True)
        if charge.quota.name == quota.name
    )
    rule = f"This {quota.subject.scope} may use {standing.limit} {_KIND_TO_WORDS[quota.kind]}"
    headers = build_headers(refusal.charges, refusal.standings)
    if refusal.wait_ms is None:
        # OpenAI's clients look at this header before they look at the status
        headers |= _NO_RETRY
        wait_s = _MINUTE_S if quota.shape == "minute" else _ceil_s(standing.reset_ms)
        message = f"{rule}, and this request alone may need {refusal.cost}; ask for fewer with max_tokens."
    else:
        wait_s = _ceil_s(refusal.wait_ms)
        message = f"{rule}{_explain(quota, refusal.cost, standing.remaining)}; try again in {wait_s} s."
    error = QuotaExceededError if quota.is_of_calendar else RateLimitExceededError
    return error(message, retry_after_s=wait_s, headers=headers)


def _explain(quota: Quota, cost: int, remaining: int) -> str:
    if quota.is_of_tokens:
        return f"; {remaining} are left, and this request may need {cost}"
    return ", and has" if quota.shape == "minute" else ", and as many run"


def _ceil_s(duration_ms: int) -> int:
    return max(1, -(-duration_ms // 1000))
