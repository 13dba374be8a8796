"""What a prefix cache is worth: the share of prompt tokens that repeat a prefix against the share that was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loraplex.advise.fact import Call, EngineFacts, Facts, PrefixFacts
from loraplex.advise.finding import Finding, percent, say_too_little

MIN_REQUESTS = 100
_HARDLY = 0.10
_WORTH = 0.05
_SWITCH = "--enable-prefix-caching"


def judge_prefixes(facts: Facts) -> Iterator[Finding]:
    """Advise on each base, or for the tenant who asks on its own calls, where prompts are computed again in vain."""
    if facts.tenant_id is not None:
        tenant_id = facts.tenant_id
        found = [engine.tenant_prefixes[tenant_id] for engine in facts.engines if tenant_id in engine.tenant_prefixes]
        own = [call for call in facts.calls if call.tenant_id == tenant_id]
        yield _judge("your calls", found, own, "")
        return
    for base in sorted({engine.base for engine in facts.engines}):
        engines = [engine for engine in facts.engines if engine.base == base]
        calls = [call for call in facts.calls if call.base == base]
        yield _judge(base, [engine.prefixes for engine in engines], calls, _find_flag(engines))


def _find_flag(engines: Sequence[EngineFacts]) -> str:
    """The flag that lets more be found: the cache itself where it is off, else twice its memory; empty: not known."""
    if any(engine.is_caching is False for engine in engines):
        return _SWITCH
    sizes = [engine.kv_bytes for engine in engines if engine.kv_bytes]
    return f"--kv-cache-memory-bytes {2 * max(sizes)}" if sizes else ""


def _judge(subject: str, prefixes: Sequence[PrefixFacts], calls: Sequence[Call], flag: str) -> Finding:
    """`flag` empty: who asks has none to set."""
    num_requests = sum(one.requests for one in prefixes)
    if num_requests < MIN_REQUESTS:
        return say_too_little("prefix_cache", subject, num_requests, MIN_REQUESTS)
    prompt_tokens = sum(one.prompt_tokens for one in prefixes)
    share = sum(one.repeated_tokens for one in prefixes) / max(1, prompt_tokens)
    cached = _share_cached(calls)
    missed = max(0.0, share - cached)
    seconds = _worth_s(calls, missed, cached)
    is_exact = not any(one.forgotten_blocks for one in prefixes)
    evidence = {
        "requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "repeated_share": round(share, 6),
        "cached_share": round(cached, 6),
        "is_exact": "yes" if is_exact else "at least this share: prefixes of long ago were taken for new",
        "prefill_s": round(sum(call.prefill_s for call in calls), 3),
        "saved_prefill_s": round(seconds, 3),
    }
    seen = f"{percent(share)} of {prompt_tokens:,} prompt tokens repeat a prefix, {percent(cached)} were found cached"
    message, effect, is_worth = f"{seen}.", "", False
    worth = f"{percent(missed)} of prompt tokens, about {seconds:,.1f} s of the {evidence['prefill_s']:,} s of prefill"
    if share < _HARDLY:
        message = f"{seen}: for this traffic a prefix cache hardly matters."
    elif flag == _SWITCH:
        is_worth, message, effect = True, f"{seen}, since it is off.", f"A cache saves up to {worth}."
    elif missed >= _WORTH and flag:
        is_worth, message = True, f"{seen}: the rest had been pushed out, or lay at another engine."
        effect = f"A larger cache, or one that keeps prefixes for good, saves up to another {worth}."
    return Finding(
        rule="prefix_cache",
        subject=subject,
        state="advice" if is_worth else "fine",
        message=message,
        effect=effect,
        flag=flag if is_worth else "",
        evidence=evidence,
    )


def _share_cached(calls: Sequence[Call]) -> float:
    return sum(call.cached_tokens for call in calls) / max(1, sum(call.prompt_tokens for call in calls))


def _worth_s(calls: Sequence[Call], missed: float, cached: float) -> float:
    """Seconds of prefill that the missed tokens took: their share of those that were computed."""
    computed = 1.0 - cached
    return sum(call.prefill_s for call in calls) * min(1.0, missed / computed) if computed > 0 else 0.0
