"""Tenants that are near their limits on calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from loraplex.advise.fact import Call, Facts, TenantFacts
from loraplex.advise.finding import Figure, Finding, percent, say_too_little

MIN_CALLS = 50
_NEAR = 0.8
_MINUTE_S = 60


def judge_limits(facts: Facts) -> Iterator[Finding]:
    """Advise on each tenant that has used four fifths of a limit, in its busiest minute or so far this day or month."""
    for tenant in facts.tenants:
        if tenant.limits and facts.tenant_id in (None, tenant.tenant_id):
            yield _judge(tenant, [call for call in facts.calls if call.tenant_id == tenant.tenant_id])


def find_peaks(calls: Sequence[Call]) -> tuple[int, int]:
    """Return requests and tokens of the busiest minute of the clock, each of its own."""
    requests: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for call in calls:
        minute = int(call.began_s // _MINUTE_S)
        requests[minute] += 1
        tokens[minute] += call.num_tokens
    return max(requests.values(), default=0), max(tokens.values(), default=0)


def _judge(tenant: TenantFacts, calls: Sequence[Call]) -> Finding:
    if len(calls) < MIN_CALLS:
        return say_too_little("limits", tenant.name, len(calls), MIN_CALLS)
    peak_requests, peak_tokens = find_peaks(calls)
    used = {
        "requests_per_minute": peak_requests,
        "tokens_per_minute": peak_tokens,
        "tokens_per_day": tenant.tokens_today,
        "tokens_per_month": tenant.tokens_this_month,
    }
    shares = {name: used[name] / limit for name, limit in tenant.limits.items() if name in used}
    evidence: dict[str, Figure] = {}
    for name in shares:
        evidence |= {f"{name}_limit": tenant.limits[name], f"{name}_used": used[name]}
    near = sorted((name for name in shares if shares[name] >= _NEAR), key=lambda name: -shares[name])
    if not near:
        told = ", ".join(f"{percent(share)} of {name}" for name, share in shares.items()) or "no limit that is counted"
        return Finding(rule="limits", subject=tenant.name, state="fine", message=f"At most {told}.", evidence=evidence)
    told = ", ".join(f"{used[name]:,} of {tenant.limits[name]:,} {name}" for name in near)
    raised = " ".join(f"--limit {name}={_round_up(used[name] * 3 // 2)}" for name in near)
    return Finding(
        rule="limits",
        subject=tenant.name,
        state="advice",
        message=f"Used {told}, in the busiest minute or so far.",
        effect="Beyond a limit calls are refused with 429: raise it by half, or spread the calls.",
        flag=f"loraplex tenants update {tenant.name} {raised}",
        evidence=evidence,
    )


def _round_up(value: int) -> int:
    """To two figures."""
    unit = int(10 ** max(0, len(str(value)) - 2))
    return -(-value // unit) * unit
