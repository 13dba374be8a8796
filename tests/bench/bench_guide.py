"""What grammars cost: `python tests/bench/bench_guide.py [--quick]`, about two minutes.

Eight streams decode together, of which none, one, four or all must match a grammar; the kinds take turns, round after
round, so that a noisy moment hits all alike. Every stream is sampled, with or without a grammar, so the difference is
the grammars' alone: the mask that the choice of the token reads, and the threads that find masks while the model runs.
A neighbour's slowdown is the step of a mixed batch against the one without grammars. Beside the clock's time of a step
stands the processor's time of the step loop's own thread, which with `--threads 1` holds on a busy machine too.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import llguidance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, follow, parse_options, percentile
from setting import open_base, random_ids

from engines import EngineWorld
from loraplex_engine.guide.rounds import Outcome, Rounds, Row

ROWS, CONSTRAINED, PROMPT, TOKENS, ROUNDS = 8, (0, 1, 4, 8), 60, 120, 6
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
        "kind": {"enum": ["small", "large", "other"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
_EMAIL = "^[a-z0-9._-]{3,20}@[a-z]{2,12}[.](com|org)$"
_SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": _ITEM, "minItems": 200},
    {"type": "array", "items": {"anyOf": [_ITEM, {"type": "number"}, {"type": "string"}]}, "minItems": 400},
    {
        "type": "array",
        "items": {"type": "string", "pattern": _EMAIL},
        "minItems": 400,
    },
]
GRAMMARS = [
    *(llguidance.LLMatcher.grammar_from_json_schema(s, overrides={"whitespace_flexible": False}) for s in _SCHEMAS),
    llguidance.LLMatcher.grammar_from_regex("([A-Z][a-z]{1,9} ){400,}"),
]


class TimedRounds(Rounds):
    """Times the masks of a step: milliseconds by the clock from asking for the first to having the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_ms: list[float] = []
        self.num_rows = self.num_alone = 0
        self._asked_at = 0.0

    def join(self, row: Row) -> Future[Outcome]:
        if not self._waiting:
            self._asked_at = time.perf_counter()
        self.num_rows += 1
        return super().join(row)

    def submit_alone(self, work: Callable[[], Outcome]) -> Future[Outcome]:
        self.num_alone += 1
        return super().submit_alone(work)

    def _run(self) -> None:
        asked_at = self._asked_at
        super()._run()
        self.wall_ms.append((time.perf_counter() - asked_at) * 1e3)


class Bench:
    """One engine whose steps are timed."""

    def __init__(self, base: Path, folder: Path, options: Any) -> None:
        settings: dict[str, Any] = {"dtype": options.dtype, "cpu_threads": options.threads, "max_num_seqs": ROWS}
        settings["max_num_batched_tokens"] = 128
        self.world = EngineWorld(base, folder / "cache", **settings)
        guides = self.world.engine._guides
        assert guides is not None
        self.rounds = guides._rounds = TimedRounds()
        self.vocab_size = self.world.engine.facts.vocab_size
        self.num_late = self.num_rows = 0

    def run(self, num_constrained: int, seed: int, num_tokens: int) -> list[tuple[float, float]]:
        """Milliseconds of the steps in which all rows decode, by the clock and of the loop's thread."""
        rng, engine = random.Random(seed), self.world.engine
        for row in range(ROWS):
            params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": seed + row}
            if row < num_constrained:
                params["grammar"] = GRAMMARS[row % len(GRAMMARS)]
            ids = random_ids(rng, PROMPT, self.vocab_size)
            engine.add(self.world.request(ids, None, num_tokens, **params))
        times = []
        while engine.has_requests:
            if engine.scheduler.running and not engine.has_running:
                # every row waits for its mask, and the loop sleeps
                time.sleep(0.001)
            is_decoding = len(engine.scheduler.running) == ROWS and engine.has_running
            is_decoding &= all(r.num_uncomputed == 1 for r in engine.scheduler.running)
            began_at, began = time.perf_counter(), time.thread_time()
            events = engine.step()
            if is_decoding and not any(event.finish for event in events):
                times.append(((time.perf_counter() - began_at) * 1e3, (time.thread_time() - began) * 1e3))
            self.num_late += engine.scheduler.guided.num_late
            self.num_rows += len(engine.scheduler.running)
            assert not any(event.error for event in events), events
        return times


def main() -> int:
    """Measure and print."""
    options = parse_options(build_parser(__doc__))
    report = Report("guide", options)
    rounds, num_tokens = (1, 12) if options.quick else (ROUNDS, TOKENS)
    times: dict[int, list[tuple[float, float]]] = {kind: [] for kind in CONSTRAINED}
    with tempfile.TemporaryDirectory() as name:
        base = open_base(options.base, Path(name), is_tiny=options.quick)
        bench = Bench(base, Path(name), options)
        for turn in follow(range(rounds), "rounds"):
            for kind in CONSTRAINED:
                # without the grammars' first uses and the prompts' last steps
                times[kind] += bench.run(kind, turn * 1000, num_tokens)[5:]
    clock = {kind: [step for step, _ in found] for kind, found in times.items()}
    thread = {kind: percentile([step for _, step in found], 50) for kind, found in times.items()}
    rows = [
        (f"{kind} of {ROWS}", len(steps), percentile(steps, 50), percentile(steps, 99), thread[kind])
        for kind, steps in clock.items()
    ]
    report.table(("rows with a grammar", "steps", "p50 ms", "p99 ms", "thread p50 ms"), rows)
    wall = bench.rounds.wall_ms
    row = ("all masks of a step, asked until there", len(wall), percentile(wall, 50), percentile(wall, 99), max(wall))
    report.table(("ms", "steps", "p50", "p99", "most"), [row])
    alone = bench.rounds.num_alone / max(1, bench.rounds.num_alone + bench.rounds.num_rows)
    report.say("alone", alone, f"\nmasks that were found alone, since they took long: {alone:.2%}")
    late = bench.num_late / max(1, bench.num_rows)
    report.say("late", late, f"\nrows that stood aside for a mask: {late:.2%} of all")
    slowdown = percentile(clock[4], 50) / percentile(clock[0], 50)
    report.check("step with half its rows under a grammar, against none", slowdown, at_most=1.05)
    report.check("the same of the loop's thread", thread[4] / thread[0], at_most=1.05)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
