"""`--max-model-len` from how long requests really are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from loraplex.advise.fact import Facts
from loraplex.advise.finding import Finding, percent, say_too_little

MIN_CALLS = 500
"""So that the 99th percentile rests on five longer ones."""
_ROOM = 1.25
_ROUND_TO = 256
_WORTH = 2.0


def judge_lengths(facts: Facts) -> Iterator[Finding]:
    """Advise on each base that is served for at least twice the length that nearly all of its requests need."""
    for base in sorted({engine.base for engine in facts.engines if engine.max_model_len is not None}):
        yield _judge(base, facts)


def _judge(base: str, facts: Facts) -> Finding:
    lengths = sorted(call.num_tokens for call in facts.calls if call.base == base and call.outcome == "ok")
    if len(lengths) < MIN_CALLS:
        return say_too_little("max_model_len", base, len(lengths), MIN_CALLS)
    engines = [engine for engine in facts.engines if engine.base == base and engine.max_model_len is not None]
    current = max(engine.max_model_len or 0 for engine in engines)
    p99 = lengths[math.ceil(0.99 * len(lengths)) - 1]
    suggested = math.ceil(p99 * _ROOM / _ROUND_TO) * _ROUND_TO
    num_longer = sum(length > suggested for length in lengths)
    evidence = {
        "requests": len(lengths),
        "median_len": lengths[len(lengths) // 2],
        "p99_len": p99,
        "longest_len": lengths[-1],
        "max_model_len": current,
        "num_longer": num_longer,
    }
    seen = f"Of {len(lengths):,} requests 99 % have {p99:,} tokens or fewer, prompt and answer together"
    if current < suggested * _WORTH:
        message = f"{seen}; the longest allowed is {current:,}."
        return Finding(rule="max_model_len", subject=base, state="fine", message=message, evidence=evidence)
    cache = min((engine.kv_tokens for engine in engines if engine.kv_tokens is not None), default=None)
    holds = (
        f"The KV cache of {cache:,} tokens holds {cache // suggested:,} requests of full length instead of "
        f"{cache // current:,}, so fewer can push others out; "
        if cache
        else ""
    )
    effect = holds + _tell_refused(num_longer, len(lengths))
    return Finding(
        rule="max_model_len",
        subject=base,
        state="advice",
        message=f"{seen}, but {current:,} are allowed.",
        effect=effect[:1].upper() + effect[1:],
        flag=f"--max-model-len {suggested}",
        evidence=evidence,
    )


def _tell_refused(num_longer: int, num_seen: int) -> str:
    if not num_longer:
        return f"none of the {num_seen:,} would have been refused, but those that ask for more max_tokens than fit are."
    share = percent(num_longer / num_seen)
    return (
        f"{num_longer:,} of the {num_seen:,} ({share}) would have been refused, and so are those that ask for more "
        "max_tokens than fit."
    )
