"""Cases of section 5 about fields and numbers, through every door: route, streamed or not, base or adapter, engine or
gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openai_answer import Answer
from openai_world import ALL_DOORS, SOME_DOORS, Door, OpenAIWorld
from support import tiny_llama_config

pytestmark = pytest.mark.pairs

VOCAB_SIZE = tiny_llama_config()["vocab_size"]
NAMES = ("max_tokens", "stop", "n", "temperature", "top_p", "logprobs", "seed", "stream_options", "tools", "user")
MORE_NAMES = (
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "response_format",
    "suffix",
    "echo",
)
RANDOM: dict[str, Any] = {"temperature": 1, "ignore_eos": True, "max_tokens": 12}


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.error
    return [choice.text for choice in answer.choices]


def test_b085_null_is_absent(world: OpenAIWorld, door: Door, long: Callable[[float, float], float]) -> None:
    # without a limit an answer fills the context, of which this leaves a tenth
    prompt = "a " * int(long(900, 5))
    body = world.body(door, prompt, max_tokens=None, temperature=None, stream_options=None, seed=5)
    plain = world.send(door, body)
    nulls = dict.fromkeys(name for name in (*NAMES, *MORE_NAMES) if name not in body)
    found = world.send(door, body | nulls)
    assert (found.status, plain.status) == (200, 200), found.error
    assert [choice.text for choice in found.choices] == [choice.text for choice in plain.choices]


def test_b086_max_tokens_is_a_positive_number(world: OpenAIWorld, door: Door) -> None:
    for value in (-1, 1.5, "5", True):
        world.refusal(door, "max_tokens", world.body(door, max_tokens=value))
    for value in (10**12, 2**70):
        where = "messages" if door.endpoint == "chat" else "prompt"
        assert world.refusal(door, where, world.body(door, max_tokens=value))["code"] == "context_length_exceeded"
    if door.endpoint == "chat":
        world.refusal(door, "max_tokens", world.body(door, max_tokens=0))
    answer = world.ask(door, max_tokens=1, ignore_eos=True)
    assert answer.usage is not None
    assert (answer.usage["completion_tokens"], answer.choices[0].finish_reason) == (1, "length")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("door", [door for door in ALL_DOORS if door.is_stream], ids=str)
def test_b093_usage_comes_only_when_asked_for(world: OpenAIWorld, door: Door, options: dict[str, Any] | None) -> None:
    answer = world.ask(door, stream_options=options)
    assert answer.has_end
    assert all(chunk.get("usage") is None for chunk in answer.objects[:-1])
    if options != {"include_usage": True}:
        assert answer.usage is None
        assert all(chunk["choices"] for chunk in answer.objects)
        return
    assert answer.objects[-1]["choices"] == []
    assert answer.usage is not None
    assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]


def test_b094_what_a_client_does_not_see_is_counted(world: OpenAIWorld) -> None:
    def count() -> int:
        with world.platform.management(world.key) as client:
            rows = client.list_usage(tenant="team")
        return sum(int(row["completion_tokens"]) for row in rows)

    [streamed] = [door for door in ALL_DOORS if str(door) == "completions-streamed-adapter-gateway"]
    before = count()
    answer = world.ask(streamed, stream_options=None, ignore_eos=True, max_tokens=12)
    assert answer.usage is None
    assert count() - before == 12


@pytest.mark.parametrize("door", ALL_DOORS, ids=str)
def test_b096_without_a_seed_answers_differ(world: OpenAIWorld, door: Door) -> None:
    in_turn = [world.ask(door, **RANDOM).text for _ in range(3)]
    with ThreadPoolExecutor(5) as pool:
        at_once = [*pool.map(lambda _: world.ask(door, **RANDOM).text, range(3))]
    assert len({*in_turn, *at_once}) > 1


@pytest.mark.parametrize("door", ALL_DOORS, ids=str)
def test_b097_choices_of_a_seed_differ_and_repeat(world: OpenAIWorld, door: Door) -> None:
    first, second = (texts(world.ask(door, seed=7, n=8, **RANDOM)) for _ in range(2))
    assert first == second
    assert len(first) == 8
    assert len({*first}) > 1


def test_b097_whole_and_streamed_draw_the_same(world: OpenAIWorld) -> None:
    for endpoint in ("chat", "completions"):
        for has_adapter in (False, True):
            doors = [door for door in ALL_DOORS if (door.endpoint, door.has_adapter) == (endpoint, has_adapter)]
            found = [texts(world.ask(door, seed=11, n=3, **RANDOM)) for door in doors]
            assert found == [found[0]] * 4


@pytest.mark.parametrize("door", SOME_DOORS, ids=str)
def test_b098_a_seed_does_not_depend_on_neighbours(world: OpenAIWorld, door: Door) -> None:
    alone = world.ask(door, seed=42, **RANDOM).text
    others = [other for other in ALL_DOORS if other != door][:7]
    with ThreadPoolExecutor(8) as pool:
        company = [pool.submit(world.ask, other, n=2, **RANDOM | {"max_tokens": 60}) for other in others]
        asked = [pool.submit(world.ask, door, seed=42, **RANDOM) for _ in range(3)]
        assert [future.result().text for future in asked] == [alone] * 3
        assert [future.result().status for future in company] == [200] * 7


def logprob_numbers(answer: Answer) -> list[float]:
    """Every log-probability in an answer."""
    numbers: list[float] = []
    for entry in (entry for choice in answer.choices for entry in choice.logprobs):
        if isinstance(entry, dict):
            numbers += [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
        else:
            numbers += [entry[1], *(entry[2] or {}).values()]
    return numbers


@pytest.mark.parametrize("bias", [None, -100, 100])
def test_b099_log_probabilities_are_finite_numbers(world: OpenAIWorld, door: Door, bias: float | None) -> None:
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if door.endpoint == "chat" else {"logprobs": 20}
    biases = None if bias is None else {str(token): bias for token in range(0, VOCAB_SIZE, 2)}
    # the reader takes no NaN and no Infinity
    answer = world.ask(door, temperature=0.01, logit_bias=biases, **wanted)
    assert answer.status == 200, answer.error
    assert all(-9999.0 <= number <= 0 for number in logprob_numbers(answer))


def test_b100_top_logprobs_have_a_limit(world: OpenAIWorld, door: Door) -> None:
    for value in (21, 10**6, -1, 1.5, "3"):
        if door.endpoint == "chat":
            world.refusal(door, "top_logprobs", world.body(door, logprobs=True, top_logprobs=value))
        else:
            world.refusal(door, "logprobs", world.body(door, logprobs=value))
    if door.endpoint == "chat":
        world.refusal(door, "top_logprobs", world.body(door, top_logprobs=5))
    assert world.ask(door).status == 200


@pytest.mark.parametrize("door", SOME_DOORS, ids=str)
def test_b101_a_bad_bias_is_refused_and_neighbours_go_on(world: OpenAIWorld, door: Door) -> None:
    bad: list[Any] = [{"999999999": 1}, {str(VOCAB_SIZE): 1}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": "1"}, [1]]
    bad += [{str(number): 1 for number in range(5000)}]
    expected = world.ask(door, max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(3) as pool:
        neighbours = [pool.submit(world.ask, door, max_tokens=200, ignore_eos=True) for _ in range(3)]
        for bias in bad:
            world.refusal(door, "logit_bias", world.body(door, logit_bias=bias))
        assert [future.result().text for future in neighbours] == [expected.text] * 3
    nan = json.dumps(world.body(door, logit_bias={"5": 0})).replace('{"5": 0}', '{"5": NaN}')
    assert world.refusal(door, None, nan.encode())["code"] == "invalid_json"


@pytest.mark.parametrize("top_k", [9_999_999, VOCAB_SIZE, 0, -1])
def test_b102_a_top_k_beyond_the_vocabulary_is_all_of_it(world: OpenAIWorld, door: Door, top_k: int) -> None:
    answers = [world.ask(door, seed=3, top_k=value, **RANDOM) for value in (None, top_k)]
    assert texts(answers[0]) == texts(answers[1])


@pytest.mark.parametrize("door", SOME_DOORS, ids=str)
def test_b102_a_greedy_row_is_not_moved_by_sampled_ones(world: OpenAIWorld, door: Door) -> None:
    greedy = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    alone = world.ask(door, **greedy).text
    with ThreadPoolExecutor(8) as pool:
        sampled = [pool.submit(world.ask, door, top_k=k, **RANDOM | {"max_tokens": 60}) for k in (1, 5, 331, 9999)]
        assert [pool.submit(world.ask, door, **greedy).result().text for _ in range(4)] == [alone] * 4
        assert [future.result().status for future in sampled] == [200] * 4


WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 2.1, "1", [], True),
    "top_p": (0, 1.1, -0.1, "1"),
    "top_k": (-2, 1.5, "1"),
    "min_p": (-0.1, 1.1),
    "n": (0, -1, 17, 1.5, "2"),
    "seed": (1.5, "7", 2**63, -(2**63) - 1),
    "stop": (5, [5], {}, [""], "", ["x"] * 17, "x" * 129),
    "stop_token_ids": ("5", ["5"], [1.5], [-1]),
    "min_tokens": (-1, 1.5, 100),
    "presence_penalty": (-2.1, 2.1, "1"),
    "frequency_penalty": (-2.1, 2.1, "1"),
    "repetition_penalty": (0, -1, 3),
    "logit_bias": (5, "x", {"x": 1}),
    "stream_options": (5, {"include_usage": 1}, {"foo": True}),
    "stream": (1, "true"),
    "user": (5, {}),
    "metadata": (5, {"a": 1}, {"a": "x" * 513}, {str(number): "" for number in range(17)}),
    "model": (5, [], {}),
    "foo": (1, {}, "x"),
}


def test_b103_fields_out_of_range_are_refused_by_name(world: OpenAIWorld, door: Door) -> None:
    for name, values in WRONG.items():
        for value in values:
            error = world.refusal(door, name, world.body(door) | {name: value})
            assert len(error["message"]) < 500
            assert (error["code"] == "unknown_parameter") == (name == "foo" or value == {"foo": True})
    for name in ("top_p", "temperature", "min_p", "presence_penalty"):
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            text = json.dumps(world.body(door) | {name: 0.125}).replace("0.125", number)
            assert world.refusal(door, None, text.encode())["code"] == "invalid_json"
    assert world.ask(door).status == 200
