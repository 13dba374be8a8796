"""An answer is the request's own: random mixes of whatever the engine does, each answer as if asked alone.

A mix draws requests of the base and of adapters of all kinds, greedy and seeded, with common beginnings, on an engine
that chunks, preempts, shares, copies and evicts, while others come and go. Alone means: on an engine without a prefix
cache, the prompt in one step, nobody beside it. Tokens and log-probabilities are compared to the last bit.

Everything in a mix follows from its number, which a failure names: `Mixes.run(name, number)` repeats it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engines import INVOCATION, KINDS, SPECIAL_KINDS, EngineWorld, PeftJudge, SavedJudge, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.core.request import Request
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.cost import Chunk
from loraplex_engine.wire.messages import TokenEvent, TokenLogprobs

PLAIN = ["r1", "r8_seven", "r16_rslora", "r64_seven", "patterns"]
SPECIAL = ["dora", "bias_all", "head", "embedding", "saved_norms", "tokens", "alora", "everything"]
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_loras": 13},
    "chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 9},
    "few-blocks": {"num_blocks": 7, "max_num_seqs": 8},
    "one-slot": {"max_loras": 1},
    "uncached": {"num_blocks": 8, "enable_prefix_caching": False},
    "all-at-once": {"num_blocks": 8, "max_loras": 2, "max_num_seqs": 5, "max_num_batched_tokens": 7},
    "small-blocks": {"num_blocks": 30, "block_size": 4, "max_loras": 4},
    "dense": {"num_blocks": 12, "block_size": 128, "max_loras": 4, "max_num_seqs": 4},
}
"""Settings apart from the defaults; `dense` keeps each request in one block, as a cache without pages would."""
HAPPENS = {
    "roomy": ("hits", "copies", "waits"),
    "chunks": ("hits", "copies", "waits"),
    "few-blocks": ("hits", "copies", "waits", "preemptions"),
    "one-slot": ("hits", "evictions"),
    "uncached": ("preemptions",),
    "all-at-once": ("hits", "copies", "waits", "preemptions", "evictions"),
    "small-blocks": ("hits", "copies", "waits", "preemptions", "evictions"),
    "dense": ("hits", "copies", "evictions"),
}
"""What the mixes on an engine must have met, or they prove nothing."""

Answer = tuple[list[int], list[TokenLogprobs], str | None, str, int]
"""Tokens, their log-probabilities, why it ended, the error's code if one did, and how long the prompt is."""


@dataclass(frozen=True)
class Ask:
    """What decides an answer; `params` without the number of the choice."""

    prompt: tuple[int, ...]
    digest: str | None
    params: tuple[tuple[str, Any], ...]


class DrawnBudget(StepBudget):
    """Chunks of any size instead of what the clock allows, so that a mix can be repeated."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._least = 1

    def begin(self, decode_context_lens: Sequence[int], prompts: Sequence[Chunk]) -> None:
        del decode_context_lens, prompts
        self._least = 1

    def allow(self, start: int, wanted: int) -> int:
        del start
        count = self._rng.randint(self._least, wanted)
        self._least = 0
        return count


class Mixes:
    """Engines of one dtype on one base, a stock of things to ask, and what each gets alone."""

    def __init__(self, base: Path, tmp: Path, folders: dict[str, Path], dtype: str) -> None:
        self._base, self._tmp, self._folders, self._dtype = base, tmp, folders, dtype
        self._alone = self._build(enable_prefix_caching=False, max_loras=len(folders))
        self._digests = [None, *(self._alone.put(folder) for folder in folders.values())]
        self._answers: dict[tuple[Ask, int], Answer] = {}
        rng = random.Random(0)
        self._trunks = [_draw_trunk(rng) for _ in range(3)]
        self.asks = [_let_score(self._draw_ask(rng), number) for number in range(150)]
        self._worlds: dict[str, EngineWorld] = {}
        self.seen: Counter[str] = Counter()

    def run(self, name: str, number: int) -> None:
        """Run a mix on an engine that keeps nothing of the mixes before it; fail if an answer is not its own."""
        world = self._find_world(name)
        engine, rng = world.engine, random.Random(number)
        engine.poison()
        for digest in engine.residency.host_digests:
            engine.residency.drop(digest)
            engine.residency.welcome(digest)
        engine.scheduler._budget = DrawnBudget(rng)
        drawn = {request.request_id: (ask, request) for ask, request in self._draw_requests(world, rng)}
        events = _serve(world, [request for _, request in drawn.values()], rng)
        engine.check_integrity()
        assert engine.pool.num_free == engine.pool.num_blocks
        for request_id, (ask, request) in drawn.items():
            answer, expected = _read(events[request_id]), self.answer_alone(ask, request.params.choice)
            if answer[2] == "abort":
                self.seen["aborts"] += 1
                expected = expected[0][: len(answer[0])], expected[1][: len(answer[1])], "abort", "", expected[-1]
            assert answer == expected, f"mix {number} on {name}, {self._dtype}: {request}"
        self._count(world, [request for _, request in drawn.values()])

    def _count(self, world: EngineWorld, requests: list[Request]) -> None:
        scheduler, slots = world.engine.scheduler, world.engine.residency.slots
        self.seen["requests"] += len(requests)
        self.seen["scored"] += sum(request.num_scored > 0 for request in requests)
        self.seen["hits"] += sum(request.num_cached > 0 for request in requests)
        self.seen["copies"] += sum(request.num_cached % world.engine.pool.block_size > 0 for request in requests)
        self.seen["preemptions"] = scheduler.num_preemptions
        self.seen["yields"] = scheduler.num_yields
        self.seen["waits"] = scheduler.prefixes.num_waits
        self.seen["evictions"] = slots.num_evictions

    def answer_alone(self, ask: Ask, choice: int = 0) -> Answer:
        if (ask, choice) not in self._answers:
            request = self._to_request(self._alone, ask, choice)
            self._answers[ask, choice] = _read(self._alone.run([request])[request.request_id])
        return self._answers[ask, choice]

    def _draw_requests(self, world: EngineWorld, rng: random.Random) -> Iterator[tuple[Ask, Request]]:
        """Up to 27 requests to a few of the adapters; some ask the same, or for several choices."""
        digests = rng.sample(self._digests, rng.choice((2, 4, len(self._digests))))
        asks = [ask for ask in self.asks if ask.digest in digests]
        for ask in rng.choices(asks, k=rng.randint(3, 9)):
            for choice in range(rng.choice((1, 1, 1, 2, 3))):
                request = self._to_request(world, ask, choice)
                request.tenant_id = rng.choice(("a", "a", "a", "b"))
                request.priority = rng.choice((0, 0, 0, -1, 1))
                yield ask, request

    def _to_request(self, world: EngineWorld, ask: Ask, choice: int) -> Request:
        return world.request(list(ask.prompt), ask.digest, choice=choice, **dict(ask.params))

    def _draw_ask(self, rng: random.Random) -> Ask:
        trunk = rng.choice(self._trunks)
        length = rng.choice((rng.randint(1, 12), rng.randint(1, 76), rng.choice((16, 32, 48, 64)) + rng.randint(-1, 1)))
        tail = [rng.randrange(3, 331) for _ in range(rng.choice((0, 0, 1, 4)))]
        digest = rng.choice((None, *self._digests, *self._digests[1:]))
        return Ask((*trunk[:length], *tail), digest, tuple(_draw_params(rng).items()))

    def _find_world(self, name: str) -> EngineWorld:
        if name not in self._worlds:
            settings = {"block_size": 16, **ENGINES[name]}
            num_blocks = settings.pop("num_blocks", 200)
            # of two layers, K and V, two heads of 20
            block_bytes = 2 * 2 * 2 * 20 * settings["block_size"] * (4 if self._dtype == "float32" else 2)
            self._worlds[name] = self._build(kv_cache_memory_bytes=num_blocks * block_bytes, **settings)
        return self._worlds[name]

    def _build(self, **settings: Any) -> EngineWorld:
        world = EngineWorld(self._base, self._tmp / "cache", dtype=self._dtype, **settings)
        for folder in self._folders.values():
            world.put(folder)
        return world


def _draw_trunk(rng: random.Random) -> list[int]:
    """A prompt of 80 tokens that many begin with; it invokes an adapter that waits for that twice."""
    trunk = [rng.randrange(3, 331) for _ in range(80)]
    for start in (rng.randrange(2, 12), rng.randrange(20, 40)):
        trunk[start : start + len(INVOCATION)] = INVOCATION
    return trunk


def _let_score(ask: Ask, number: int) -> Ask:
    """Each seventh thing asked for is how likely the prompt is, with an answer or without."""
    if number % 7:
        return ask
    params = dict(ask.params) | {"prompt_logprobs": number % 3}
    return replace(ask, params=tuple((params if number % 2 else params | {"max_tokens": 0}).items()))


def _draw_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 14), "logprobs": rng.choice((None, 0, 3))}
    if rng.random() < 0.6:
        params |= {"temperature": rng.choice((0.7, 1.0, 1.4)), "seed": rng.randrange(1 << 63)}
        params |= {
            "top_p": rng.choice((1.0, 0.9)),
            "top_k": rng.choice((0, 0, 1, 20)),
            "min_p": rng.choice((0.0, 0.05)),
        }
    if rng.random() < 0.4:
        params |= {"presence_penalty": rng.choice((0.0, 0.6)), "frequency_penalty": rng.choice((0.0, 1.0))}
        params["repetition_penalty"] = rng.choice((1.0, 1.3))
    if rng.random() < 0.3:
        params["logit_bias"] = tuple((rng.randrange(331), rng.choice((-100.0, 3.0))) for _ in range(3))
    if rng.random() < 0.3:
        stops = tuple(rng.sample(range(3, 331), 40))
        params |= {"ignore_eos": False, "stop_token_ids": stops, "min_tokens": rng.choice((0, 2))}
    return params


def _serve(world: EngineWorld, requests: list[Request], rng: random.Random) -> dict[str, list[TokenEvent]]:
    """Add the requests over time, abort some, overwrite what nobody uses; events by request id."""
    engine = world.engine
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    due = [rng.choice((0, 0, rng.randint(0, 20))) for _ in requests]
    aborts = {rng.randint(1, 25): request.request_id for request in requests if rng.random() < 0.15}
    for number in range(5_000):
        for at, request in zip(due, requests, strict=True):
            if at == number:
                engine.add(request)
        if number in aborts and (event := engine.abort(aborts[number])) is not None:
            events[event.request_id].append(event)
        if rng.random() < 0.05:
            engine.poison()
        for event in engine.step():
            events[event.request_id].append(event)
        if number >= 20 and not engine.has_requests:
            return events
    raise AssertionError(f"requests did not end: {[e for e in events if not events[e] or not events[e][-1].finish]}")


def _read(events: list[TokenEvent]) -> Answer:
    last, ids = events[-1], text_ids(events)
    assert last.stats is not None
    # a stop token is counted and not told
    assert last.stats.completion_tokens - len(ids) in ((0, 1) if last.finish == "stop" else (0,))
    told = [logprobs for event in events for logprobs in (*event.prompt_logprobs, *event.logprobs)]
    return ids, told, last.finish, last.error.code if last.error else "", last.stats.prompt_tokens


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    tmp = tmp_path_factory.mktemp("mixes")
    base = pull(str(tiny_llama), tmp / "bases")
    plain = PeftJudge(base, {kind: KINDS[kind] for kind in PLAIN}, tmp / "plain", std=0.15).folders
    special = SavedJudge(base, {kind: SPECIAL_KINDS[kind] for kind in SPECIAL}, tmp / "special", std=0.15).folders
    return base, {**plain, **special}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def mixes(
    request: pytest.FixtureRequest, folders: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Mixes:
    return Mixes(folders[0], tmp_path_factory.mktemp("mixes"), folders[1], request.param)


@pytest.mark.endure
@pytest.mark.parametrize("name", ENGINES)
def test_each_answer_of_a_mix_is_the_one_that_the_request_gets_alone(
    mixes: Mixes, name: str, long: Callable[[float, float], float]
) -> None:
    def has_met_all() -> bool:
        return all(mixes.seen[event] > long(0, 4) for event in ("aborts", "scored", *HAPPENS[name]))

    mixes.seen.clear()
    first, num_mixes = list(ENGINES).index(name) * 25, 0
    # as many as it takes: `dense` evicts nothing for long
    while num_mixes < long(4, 25) or (num_mixes < 25 and not has_met_all()):
        mixes.run(name, first + num_mixes)
        num_mixes += 1
    assert mixes.seen["requests"] > 8 * num_mixes
    assert has_met_all(), mixes.seen


def test_answers_alone_are_as_they_should_be_and_differ(mixes: Mixes) -> None:
    answers = [mixes.answer_alone(ask) for ask in mixes.asks]
    # no invocation in the prompt
    assert {answer[3] for answer in answers} == {"", "alora_invocation_missing"}
    long = [tuple(ids) for ids, *_ in answers if len(ids) > 3]
    assert len(long) > len(answers) // 2
    assert len(set(long)) > 0.6 * len(long)
