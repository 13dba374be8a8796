"""`--max-loras` from how often adapters that were there before are loaded again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from loraplex.advise.fact import Call, EngineFacts, Facts
from loraplex.advise.finding import Finding, percent, say_too_little

MIN_CALLS = 200
_MANY_SHARE = 0.05
_FEW_SHARE = 0.01


def judge_slots(facts: Facts) -> Iterator[Finding]:
    """Advise on each engine where at least one call of an adapter in twenty loads it again."""
    calls = defaultdict(list)
    for call in facts.calls:
        if call.digest is not None:
            calls[call.replica].append(call)
    for engine in facts.engines:
        if engine.max_loras is not None:
            yield _judge(engine, engine.max_loras, calls[engine.url])


def _judge(engine: EngineFacts, current: int, calls: Sequence[Call]) -> Finding:
    if len(calls) < MIN_CALLS:
        return say_too_little("max_loras", engine.name, len(calls), MIN_CALLS, "adapter calls")
    loads = [call for call in calls if call.load_bytes]
    num_again = len(loads) - len({call.digest for call in loads})
    num_adapters = len({call.digest for call in calls})
    evidence = {
        "calls": len(calls),
        "adapters": num_adapters,
        "loads": len(loads),
        "loads_again": num_again,
        "max_loras": current,
    }
    seen = f"{num_again:,} of {len(calls):,} calls of {num_adapters:,} adapters loaded again what had been in a slot"
    suggested = choose_slots([call.digest or "" for call in calls], current)
    if num_again < _MANY_SHARE * len(calls) or suggested is None:
        return Finding(rule="max_loras", subject=engine.name, state="fine", message=f"{seen}.", evidence=evidence)
    slots, expected = suggested
    more_bytes = (slots - current) * sum(call.load_bytes for call in loads) // len(loads)
    return Finding(
        rule="max_loras",
        subject=engine.name,
        state="advice",
        message=f"{seen} ({percent(num_again / len(calls))}), with {current} slots.",
        effect=(
            f"With {slots} slots the same calls, one after another, load {expected:,} times again; "
            f"it takes {_show_size(more_bytes)} more."
        ),
        flag=f"--max-loras {slots}",
        evidence=evidence | {"expected_loads_again": expected, "more_bytes": more_bytes},
    )


def _show_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 2**10:,.0f} KiB"


def choose_slots(digests: Sequence[str], current: int) -> tuple[int, int] | None:
    """Return the fewest slots above `current` with which hardly a call loads again, and how many then do.

    None: more slots than there are would change nothing.
    """
    distances = count_distances(digests)
    farthest = max(distances, default=0)
    for slots in range(current + 1, farthest + 1):
        num_again = sum(count for distance, count in distances.items() if distance > slots)
        if num_again <= _FEW_SHARE * len(digests):
            return slots, num_again
    return None


def count_distances(digests: Sequence[str]) -> Counter[int]:
    """Return how often an adapter was called again that was the n-th latest one: it is in a slot if there are n.

    Source: Mattson et al.: Evaluation techniques for storage hierarchies, IBM Systems Journal 9 (1970).
    """
    latest: list[str] = []
    distances: Counter[int] = Counter()
    for digest in digests:
        try:
            index = latest.index(digest)
        except ValueError:
            pass
        else:
            distances[index + 1] += 1
            del latest[index]
        latest.insert(0, digest)
    return distances
