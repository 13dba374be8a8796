"""`--max-num-seqs` below where preemptions start."""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.advise.fact import EngineFacts, Facts
from loraplex.advise.finding import Finding, percent, say_too_little

MIN_REQUESTS = 200
_MANY_SHARE = 0.01


def judge_seats(facts: Facts) -> Iterator[Finding]:
    """Advise on each engine that takes blocks back from at least one request in a hundred."""
    for engine in facts.engines:
        if engine.max_num_seqs is not None:
            yield _judge(engine, engine.max_num_seqs)


def _judge(engine: EngineFacts, current: int) -> Finding:
    num_requests = engine.prefixes.requests
    if num_requests < MIN_REQUESTS:
        return say_too_little("max_num_seqs", engine.name, num_requests, MIN_REQUESTS)
    evidence = {
        "requests": num_requests,
        "preemptions": engine.preemptions,
        "preempted_at": engine.preempted_at,
        "max_num_seqs": current,
    }
    share = engine.preemptions / num_requests
    seen = f"{engine.preemptions:,} preemptions over {num_requests:,} requests since the engine started"
    suggested = min((engine.preempted_at or current) - 1, current - 1)
    if share < _MANY_SHARE or suggested < 1:
        rest = "" if share < _MANY_SHARE else ", with one request running: the KV cache is too small for the lengths"
        return Finding(
            rule="max_num_seqs", subject=engine.name, state="fine", message=f"{seen}{rest}.", evidence=evidence
        )
    return Finding(
        rule="max_num_seqs",
        subject=engine.name,
        state="advice",
        message=f"{seen} ({percent(share)}); nine of ten happened with {engine.preempted_at} or more running.",
        effect=(
            f"With {suggested} seats requests wait for one instead of computing their tokens twice; a larger "
            "--kv-cache-memory-bytes lets them run side by side."
        ),
        flag=f"--max-num-seqs {suggested}",
        evidence=evidence,
    )
