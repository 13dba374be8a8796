"""Without compiled code the torch forms serve: to a mix of all kinds of adapters, the same answers up to rounding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engines import (
    INVOCATION,
    KINDS,
    SPECIAL_KINDS,
    EngineWorld,
    PeftJudge,
    SavedJudge,
    assert_greedy_matches,
    assert_logits_close,
    text_ids,
)
from loraplex_engine.bases.pull import pull
from loraplex_engine.ops.dispatch import select_kernels
from loraplex_engine.ops.linear import fastest_form
from loraplex_engine.ops.native.build import native_status

NUM_TOKENS = 16
TOLERANCE = {"float32": {"atol": 1e-4, "gap": 1e-3}, "bfloat16": {"atol": 0.6, "gap": 0.25}}
Rows = list[tuple[list[int], Path | None]]


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pull(str(tiny_llama), tmp_path_factory.mktemp("torch-form"))


@pytest.fixture(scope="module")
def rows(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A prompt for each kind of adapter and two for the base; some are longer than a tile of the attention."""
    tmp = tmp_path_factory.mktemp("adapters")
    plain, special = PeftJudge(base, KINDS, tmp / "plain", std=0.15), SavedJudge(base, SPECIAL_KINDS, tmp, std=0.15)
    rng = random.Random(4)
    folders = [None, *plain.folders.values(), None, *special.folders.values()]
    return [([*(rng.randrange(3, 331) for _ in range(rng.randint(20, 90))), *INVOCATION, 281], f) for f in folders]


def _clear_choices() -> None:
    """Forget which forms serve, as a new process would."""
    for choice in (native_status, select_kernels, fastest_form):
        choice.cache_clear()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and what is built from then on is what LORAPLEX_NATIVE=0 makes of it."""

    def switch_off() -> None:
        monkeypatch.setenv("LORAPLEX_NATIVE", "0")
        _clear_choices()

    yield switch_off
    monkeypatch.undo()
    _clear_choices()


def _build(base: Path, tmp: Path, dtype: str, rows: Rows) -> tuple[EngineWorld, list[tuple[list[int], str | None]]]:
    """An engine that takes the rows in several steps of many of them, and the rows with digests."""
    settings = {"max_num_batched_tokens": 100, "max_num_seqs": 32, "max_loras": len(rows)}
    world = EngineWorld(base, tmp / "cache", dtype=dtype, **settings)
    return world, [(ids, None if folder is None else world.put(folder)) for ids, folder in rows]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_torch_form_answers_as_the_native_one(
    dtype: str, base: Path, rows: Rows, tmp_path: Path, without_native: Callable[[], None]
) -> None:
    native, asked = _build(base, tmp_path, dtype, rows)
    if native.engine.facts.ops != "native":
        pytest.skip("this machine has no native form to compare with")
    prompts = native.score(asked)
    requests = [native.request(ids, digest, NUM_TOKENS) for ids, digest in asked]
    answers = [text_ids(events) for events in native.run(requests).values()]
    wholes = native.score([(ids + more, digest) for (ids, digest), more in zip(asked, answers, strict=True)])
    without_native()
    world, _ = _build(base, tmp_path, dtype, rows)
    assert (world.engine.facts.ops, world.engine.facts.dtype) == ("torch", dtype)
    for ours, reference, (_, folder) in zip(world.score(asked), prompts, rows, strict=True):
        assert not torch.equal(ours, reference), "the native form answered"
        assert_logits_close(ours, reference, name=folder and folder.name, **TOLERANCE[dtype])
    requests = [world.request(ids, digest, NUM_TOKENS) for ids, digest in asked]
    num_compared = 0
    for events, whole, (ids, _) in zip(world.run(requests).values(), wholes, asked, strict=True):
        assert len(text_ids(events)) == NUM_TOKENS
        num_compared += assert_greedy_matches(text_ids(events), whole, len(ids), gap=TOLERANCE[dtype]["gap"])
    assert num_compared > 0.7 * NUM_TOKENS * len(rows)
