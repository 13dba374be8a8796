"""How likely a prompt is: what the engine says of its tokens, by whichever way it computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import SEVEN, EngineWorld, text_ids
from loraplex_engine.bases.pull import pull
from loraplex_engine.wire.messages import TokenEvent, TokenLogprobs
from support import write_adapter, write_json, write_safetensors

LENGTHS = [1, 2, 17, 40, 63]


class Case:
    """Prompts on the base, on two adapters, and on one that acts from a place in the prompt."""

    def __init__(self, base: Path, tmp: Path, dtype: str) -> None:
        self.base, self.tmp, self.dtype = base, tmp, dtype
        self.folders = [write_adapter(tmp / f"a{i}", base, rank=4 + 4 * i, targets=SEVEN, seed=i) for i in range(2)]
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]
        self.rows = [(ids, adapter) for ids in prompts for adapter in (None, 0, 1)]

    def world(self, **settings: Any) -> tuple[EngineWorld, list[tuple[list[int], str | None]]]:
        """An engine, and the prompts with the digests of their adapters."""
        world = EngineWorld(self.base, self.tmp / "cache", dtype=self.dtype, cpu_threads=1, **settings)
        digests = [world.put(folder) for folder in self.folders]
        return world, [(ids, None if adapter is None else digests[adapter]) for ids, adapter in self.rows]

    def scores(self, rounds: int = 1, max_tokens: int = 0, **settings: Any) -> tuple[EngineWorld, list[Any]]:
        """The log-probabilities of every prompt in the last of some rounds."""
        world, rows = self.world(**settings)
        found: list[Any] = []
        for _ in range(rounds):
            requests = [world.request(*row, max_tokens, prompt_logprobs=i % 4) for i, row in enumerate(rows)]
            events = world.run(requests)
            found = [_read(events[request.request_id]) for request in requests]
        return world, found


def _read(events: list[TokenEvent]) -> list[TokenLogprobs]:
    assert all(not event.prompt_logprobs and event.error is None for event in events[1:])
    assert events[0].error is None
    return list(events[0].prompt_logprobs)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tmp = tmp_path_factory.mktemp("scores")
    return Case(pull(str(tiny_llama), tmp / "bases"), tmp, request.param)


@pytest.fixture(scope="module")
def expected(case: Case) -> list[Any]:
    return case.scores(enable_prefix_caching=False)[1]


def test_they_are_the_log_softmax_of_the_logits_before_each_token(case: Case, expected: list[Any]) -> None:
    world, rows = case.world()
    for index, ((ids, _), logits) in enumerate(zip(rows, world.score(rows), strict=True)):
        truth = torch.log_softmax(logits.double(), dim=-1)[:-1]
        assert len(expected[index]) == len(ids) - 1
        for position, told in enumerate(expected[index]):
            assert told.logprob == pytest.approx(float(truth[position, ids[position + 1]]), abs=5e-6)
            assert len(told.top) == index % 4
            for token_id, value in told.top:
                assert value == pytest.approx(float(truth[position, token_id]), abs=5e-6)
            likeliest = truth[position].topk(index % 4).values
            assert torch.allclose(torch.tensor([v for _, v in told.top]).double(), likeliest, atol=5e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_seqs": 1},
        {"max_loras": 1},
        {"rounds": 2},
        {"max_tokens": 3, "rounds": 2, "max_num_batched_tokens": 31},
    ],
    ids=str,
)
def test_the_way_changes_nothing(case: Case, expected: list[Any], settings: dict[str, Any]) -> None:
    assert case.scores(**settings)[1] == expected


def test_preemption_changes_nothing(case: Case, expected: list[Any]) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 20 * (4 if case.dtype == "float32" else 2)
    world, scores = case.scores(max_tokens=16, kv_cache_memory_bytes=8 * block_bytes, max_num_batched_tokens=16)
    assert scores == expected
    assert world.engine.scheduler.num_preemptions > 0


def test_an_answer_scored_as_a_prompt_has_the_bits_that_it_had_as_an_answer(case: Case) -> None:
    world, rows = case.world()
    requests = [world.request(*row, 12, temperature=0.9, seed=i, logprobs=3) for i, row in enumerate(rows)]
    events = world.run(requests)
    answers = [events[request.request_id] for request in requests]
    wholes = [
        world.request(ids + text_ids(answer), digest, 0, prompt_logprobs=3)
        for (ids, digest), answer in zip(rows, answers, strict=True)
    ]
    events = world.run(wholes)
    for (ids, _), answer, whole in zip(rows, answers, wholes, strict=True):
        told = [logprobs for event in answer for logprobs in event.logprobs]
        assert _read(events[whole.request_id])[len(ids) - 1 :] == told


def test_scored_prompts_and_requests_without_tokens_leave_their_prefix_to_others(case: Case) -> None:
    world, _ = case.world()
    ids = list(range(3, 73))
    for params in ({"prompt_logprobs": 1}, {}):
        world.engine.poison()
        (last,) = next(iter(world.run([world.request(ids, None, 0, **params)]).values()))
        assert (last.finish, last.token_ids, last.stats.completion_tokens) == ("length", [], 0)
        assert len(last.prompt_logprobs) == (69 if params else 0)
        answer = world.request([*ids, 99], None, 1)
        world.run([answer])
        assert answer.num_cached == 70


@pytest.mark.parametrize("where", ["layers", "head"])
def test_an_adapter_that_overflows_fails_requests_that_only_score(
    case: Case, tiny_llama: Path, tmp_path: Path, where: str
) -> None:
    world, rows = case.world()
    folder = write_adapter(tmp_path / "bad", tiny_llama, std=1e30)
    if where == "head":
        _move_to_head(folder, tiny_llama)
    bad = world.put(folder)
    good = world.request(*rows[-1], 0, prompt_logprobs=2)
    # the hidden states are finite where only the head overflows, and nobody asks for what it says
    counts = (None, 0) if where == "layers" else (0, 3)
    doomed = [world.request(list(range(3, 40)), bad, 0, prompt_logprobs=count) for count in counts]
    events = world.run([good, *doomed])
    for request in doomed:
        (end,) = events[request.request_id]
        assert end.error is not None
        assert end.error.code == "adapter_output_invalid"
        assert len(end.prompt_logprobs) == 0
    assert len(_read(events[good.request_id])) == len(rows[-1][0]) - 1


def _move_to_head(folder: Path, base: Path) -> None:
    """Let an adapter act on the head alone, with factors that overflow there."""
    facts = json.loads((base / "config.json").read_text())
    shapes = {"A": (8, facts["hidden_size"]), "B": (facts["vocab_size"], 8)}
    rng = np.random.default_rng(1)
    tensors = {
        f"base_model.model.lm_head.lora_{name}.weight": rng.normal(size=shape) * 1e30 for name, shape in shapes.items()
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors, "float32")
    config = json.loads((folder / "adapter_config.json").read_text())
    write_json(folder / "adapter_config.json", config | {"target_modules": ["lm_head"]})
