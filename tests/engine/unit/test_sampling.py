from __future__ import annotations

import gc
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex_engine.core.request import Request
from loraplex_engine.sampling.counts import TokenCounts
from loraplex_engine.sampling.sampler import Sampler, Samples
from loraplex_engine.sampling.uniform import stream, uniform
from loraplex_engine.wire.messages import SamplingParams

EOS = 3


def _logits(rows: int = 1, vocab: int = 5000, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _request(name: str = "r", output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2), **params) -> Request:
    request = Request(name, list(prompt), SamplingParams(100, **{"temperature": 0.0, **params}))
    request.output_ids += output
    return request


def _sample(logits: torch.Tensor, *requests: Request, eos: tuple[int, ...] = ()) -> Samples:
    return Sampler(eos).sample(logits, requests)


def _token(logits: torch.Tensor, *, eos: tuple[int, ...] = (), **params) -> int:
    return _sample(logits, _request(**params), eos=eos).token_ids["r"]


def test_uniform_numbers_are_spread_evenly_and_differ_by_every_counter() -> None:
    streams = [stream(seed, choice) for seed in range(10) for choice in range(10)]
    numbers = [uniform(stream_id, position) for stream_id in streams for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert 0.49 < sum(numbers) / len(numbers) < 0.51
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert counts.min() > 900


def test_uniform_number_of_a_seed_stays_what_it_was() -> None:
    assert [uniform(stream(5, 1), position) for position in (0, 1)] == [0.6449285097422731, 0.9188131408909599]


def test_sample_depends_on_seed_choice_and_position_alone_not_on_company() -> None:
    logits = _logits(8)
    requests = [_request(f"r{i}", (7,) * i, temperature=0.9, top_p=0.95, seed=i) for i in range(8)]
    together = _sample(logits, *requests).token_ids
    assert together == {f"r{i}": _sample(logits[i : i + 1], r).token_ids[f"r{i}"] for i, r in enumerate(requests)}
    assert len({_token(logits[:1], temperature=0.9, seed=1, output=(7,) * i) for i in range(20)}) > 5
    assert len({_token(logits[:1], temperature=0.9, seed=1, choice=i) for i in range(20)}) > 5


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = _logits() * 100
    assert {_token(logits, temperature=t, seed=seed) for t in (1e-6, 1e-300) for seed in range(5)} == {
        int(logits.argmax())
    }


def test_endings_are_forbidden_before_min_tokens_and_not_after() -> None:
    logits = torch.tensor([[0.0, 1.0, 4.0, 5.0]])
    wanted = {"min_tokens": 2, "stop_token_ids": (2,), "eos": (EOS,)}
    assert [_token(logits, output=(1,) * n, **wanted) for n in range(4)] == [1, 1, EOS, EOS]
    assert logits.tolist() == [[0.0, 1.0, 4.0, 5.0]]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    assert _token(logits, min_tokens=5, stop_token_ids=(1, 2, 10**12), logit_bias=((-1, 9.0), (7, 9.0))) == 0


@pytest.mark.parametrize(("bias", "expected"), [(100.0, 1), (-100.0, 2), (1.5, 2), (2.5, 1)])
def test_logit_bias_is_added(bias: float, expected: int) -> None:
    assert _token(torch.tensor([[0.0, 2.0, 4.0]]), logit_bias=((1, bias),)) == expected


def test_bias_of_minus_100_bans_and_plus_100_forces_in_draws_too() -> None:
    logits = _logits(vocab=20)
    best = int(logits.argmax())
    draws = {seed: _token(logits, temperature=1.0, seed=seed, logit_bias=((best, -100.0),)) for seed in range(200)}
    assert best not in draws.values()
    assert {_token(logits, temperature=1.0, seed=seed, logit_bias=((5, 100.0),)) for seed in range(50)} == {5}


def test_presence_and_frequency_act_on_the_output_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.5, 1.0]])
    assert _token(logits, prompt=(1, 1), presence_penalty=1.0) == 1
    assert _token(logits, output=(1,), presence_penalty=1.0) == 2
    assert _token(logits, output=(1, 1, 1), presence_penalty=0.4) == 1
    assert _token(logits, output=(1, 1, 1), frequency_penalty=0.4) == 2
    assert _token(logits, output=(3,), presence_penalty=-2.0) == 1
    assert _token(logits, output=(3,), presence_penalty=-2.1) == 3


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not_in_prompt_and_output() -> None:
    assert _token(torch.tensor([[0.0, 3.0, 2.0]]), prompt=(1,), repetition_penalty=1.6) == 2
    assert _token(torch.tensor([[0.0, 3.0, 2.0]]), prompt=(0,), output=(1, 1), repetition_penalty=1.4) == 1
    assert _token(torch.tensor([[-3.0, -1.0, -2.0]]), prompt=(1,), repetition_penalty=2.5) == 2
    assert _token(torch.tensor([[-3.0, -1.0, -2.0]]), prompt=(0,), repetition_penalty=0.3) == 0


def test_bias_comes_before_penalties_and_repetition_before_the_others() -> None:
    # (1 + 2) / 1.5 - 0.5 = 1.5; other orders make 2.17 or 1.67 of it
    wanted = {
        "prompt": (1,),
        "output": (1,),
        "logit_bias": ((1, 2.0),),
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
    }
    assert _token(torch.tensor([[1.45, 1.0]]), **wanted) == 1
    assert _token(torch.tensor([[1.55, 1.0]]), **wanted) == 0


def test_penalties_of_a_request_that_starts_over_are_the_same() -> None:
    logits = _logits(vocab=10)
    penalties = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    sampler, request = Sampler(()), _request(**penalties)
    for _ in range(30):
        token = sampler.sample(logits, [request]).token_ids["r"]
        assert token == _token(logits, output=tuple(request.output_ids), **penalties)
        request.output_ids.append(token)
    assert len(set(request.output_ids)) > 5


@given(
    prompt=st.lists(st.integers(0, 9), max_size=20),
    pieces=st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=8),
)
def test_counts_that_catch_up_are_those_of_the_whole_output(prompt: list[int], pieces: list[list[int]]) -> None:
    output: list[int] = []
    counts = TokenCounts(prompt, sum(map(len, pieces)))
    for piece in pieces:
        output += piece
        ids, values = counts.catch_up(output)
        expected = {token_id: Counter(output)[token_id] for token_id in (*prompt, *output)}
        assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == expected
        assert len(ids) == len(expected)


def test_sampler_keeps_nothing_of_requests_that_are_gone() -> None:
    sampler = Sampler(())
    for index in range(20):
        sampler.sample(_logits(), [_request(f"r{index}", repetition_penalty=1.1)])
    gc.collect()
    assert len(sampler._prepared) == 0


def test_logprobs_are_those_of_the_model_before_all_changes() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    expected = torch.log_softmax(logits, -1)[0].tolist()
    changes = {"temperature": 0.5, "top_k": 1, "logit_bias": ((2, 9.0),), "presence_penalty": 1.0, "output": (1,)}
    told = _sample(logits, _request(logprobs=3, **changes)).logprobs["r"]
    assert told.logprob == pytest.approx(expected[2])
    assert [token_id for token_id, _ in told.top] == [1, 3, 2]
    assert [value for _, value in told.top] == pytest.approx([expected[1], expected[3], expected[2]])


def test_logprobs_come_to_those_who_ask_with_as_many_as_they_ask_for() -> None:
    requests = [_request("none"), _request("zero", logprobs=0), _request("two", logprobs=2, temperature=1.0)]
    samples = _sample(_logits(3), *requests)
    assert {name: len(told.top) for name, told in samples.logprobs.items()} == {"zero": 0, "two": 2}


def test_logprobs_leave_out_what_cannot_happen() -> None:
    told = _sample(torch.tensor([[-math.inf, 1.0, 0.0]]), _request(logprobs=3)).logprobs["r"]
    assert [token_id for token_id, _ in told.top] == [1, 2]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [-math.inf, math.nan]])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 1}, {"temperature": 1.0}])
def test_rows_that_are_not_finite_are_invalid_and_harm_no_neighbour(bad: list[float], params: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 9.0], bad, [9.0, 0.0]])
    samples = _sample(logits, *(_request(name, **params) for name in ("a", "bad", "b")))
    assert samples.token_ids == {"a": 1, "b": 0}
    assert samples.invalid == {"bad"}
    assert "bad" not in samples.logprobs


def test_row_with_every_token_forbidden_is_invalid() -> None:
    samples = _sample(torch.tensor([[0.0, -math.inf]]), _request(min_tokens=1, stop_token_ids=(0,)))
    assert samples.invalid == {"r"}


def test_no_rows_are_no_samples() -> None:
    assert _sample(_logits(0)) == Samples()
