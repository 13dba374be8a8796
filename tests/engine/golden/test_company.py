"""A row's bits do not depend on its company: random mixes of prefills, decodes, arrivals and aborts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import KINDS, EngineWorld, PeftJudge, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.wire.messages import TokenEvent

NUM_MIXES = {"tiny_llama": (40, 200), "tiny_qwen2": (20, 50), "smollm2_base": (0, 3)}
"""In `make test` and in `make endure`."""
NUM_TOKENS = 12


class Company:
    """An engine whose steps are disturbed: requests come, and some are aborted, before each of them."""

    def __init__(self, base: Path, folders: dict[str, Path], cache: Path, dtype: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = EngineWorld(base, cache, dtype=dtype, max_loras=6, max_num_batched_tokens=48, cpu_threads=1)
        digests: list[str | None] = [None, *(self.world.put(folder) for folder in folders.values())]
        vocab = self.world.engine.facts.vocab_size
        self.rows = [
            ([self.rng.randrange(3, vocab) for _ in range(self.rng.choice((2, 9, 17, 40, 70)))], digest)
            for digest in digests * 2
        ]
        self.logits = [self.world.score([row])[0] for row in self.rows]
        self.tokens = [self._generate(row) for row in self.rows]
        self.num_prefixes = 0
        self._running: dict[str, tuple[int, list[TokenEvent]]] = {}
        self._step = self.world.engine.step

    def score_among_others(self) -> tuple[list[int], list[Tensor]]:
        """Logits of a few random rows, computed while other requests come and go."""
        chosen = self.rng.sample(range(len(self.rows)), self.rng.randint(1, 4))
        self.world.engine.step = self._disturbed_step  # type: ignore[method-assign]
        try:
            return chosen, self.world.score([self.rows[index] for index in chosen])
        finally:
            self.world.engine.step = self._step  # type: ignore[method-assign]

    def _disturbed_step(self) -> list[TokenEvent]:
        engine = self.world.engine
        for _ in range(self.rng.choice((0, 0, 1, 1, 2)) if len(self._running) < 12 else 0):
            index = self.rng.randrange(len(self.rows))
            request = self.world.request(*self.rows[index], NUM_TOKENS)
            self._running[request.request_id] = index, []
            engine.add(request)
        if self._running and self.rng.random() < 0.15:
            aborted = self.rng.choice(list(self._running))
            engine.abort(aborted)
            del self._running[aborted]
        events = self._step()
        for event in events:
            self._note(event)
        return events

    def _note(self, event: TokenEvent) -> None:
        if event.request_id not in self._running:
            return
        index, events = self._running[event.request_id]
        events.append(event)
        assert event.error is None
        if event.finish:
            assert text_ids(events) == self.tokens[index]
            self.num_prefixes += event.stats is not None and event.stats.cached_tokens > 0
            del self._running[event.request_id]

    def _generate(self, row: tuple[list[int], str | None]) -> list[int]:
        request = self.world.request(*row, NUM_TOKENS)
        return text_ids(self.world.run([request])[request.request_id])


@pytest.mark.endure
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NUM_MIXES)
def test_bits_are_the_same_alone_and_in_random_mixes(
    name: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path, long: Callable[[float, float], float]
) -> None:
    if not long(*NUM_MIXES[name]):
        pytest.skip("takes half a minute; tiny bases are held to the same, and the real one by test_parity.py")
    source: Path = request.getfixturevalue(name)
    base = source if name == "smollm2_base" else pull(str(source), tmp_path / "bases")
    is_tiny = base is not source
    kinds = KINDS if is_tiny else {kind: KINDS[kind] for kind in ("r8_seven", "r64_seven", "patterns", "r4")}
    folders = PeftJudge(base, kinds, tmp_path / "peft", std=0.15 if is_tiny else 0.03).folders
    company = Company(base, folders, tmp_path / "cache", dtype, seed=3)
    assert len({tuple(tokens) for tokens in company.tokens}) > len(company.tokens) // 2
    for _ in range(int(long(*NUM_MIXES[name]))):
        for index, logits in zip(*company.score_among_others(), strict=True):
            assert torch.equal(logits, company.logits[index])
    assert company.num_prefixes > 0 or not is_tiny
