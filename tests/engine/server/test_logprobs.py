"""Log-probabilities, penalties and biases over HTTP, against a scripted core: shapes, counts, and the text beside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex_engine.server import spec
from loraplex_engine.wire.messages import TokenLogprobs
from scripted_core import BASE, Rig, running_rig
from toy_tokenizers import write_byte_level

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": True,
    "top_logprobs": 3,
}
PROMPT: dict[str, Any] = {"model": BASE, "prompt": "hi", "max_tokens": 100, "logprobs": 3}
BOTH = [(CHAT_PATH, CHAT), (COMPLETION_PATH, PROMPT)]
# characters that the tokenizer has never seen: several tokens for each
EMOJI = "\U0001f3c4日"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


class Answer:
    """One choice, put together from a whole answer or from a stream's chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.finish: str | None = None
        self.entries: list[dict[str, Any]] = []

    def add(self, choice: dict[str, Any]) -> None:
        message = choice.get("message") or choice.get("delta")
        text = choice.get("text", "") if message is None else message.get("content", "")
        self.text += text
        self.finish = choice["finish_reason"] or self.finish
        self.entries += read_entries(choice["logprobs"])


def read_entries(logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Either shape as one object per token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        assert logprobs["refusal"] is None
        return list(logprobs["content"])
    columns = zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True
    )
    names = ("token", "logprob", "top", "offset")
    return [dict(zip(names, row, strict=True)) for row in columns]


def read_whole(response: httpx.Response) -> list[Answer]:
    assert response.status_code == 200, response.text
    answers = []
    for choice in response.json()["choices"]:
        answers.append(Answer())
        answers[-1].add(choice)
    return answers


def read_stream(response: httpx.Response) -> list[Answer]:
    assert response.status_code == 200, response.text
    answers: dict[int, Answer] = {}
    for block in response.text.split("\n\n"):
        if not block.startswith("data: {"):
            continue
        for choice in json.loads(block.removeprefix("data: "))["choices"]:
            answers.setdefault(choice["index"], Answer()).add(choice)
    return [answers[index] for index in sorted(answers)]


async def both_ways(rig: Rig, path: str, body: dict[str, Any]) -> list[Answer]:
    """The choices of a whole answer, which are those of the stream."""
    whole = read_whole(await rig.post(path, body))
    streamed = read_stream(await rig.post(path, body | {"stream": True}))
    assert [vars(answer) for answer in streamed] == [vars(answer) for answer in whole]
    return whole


async def test_a_chat_states_each_token_with_its_bytes_and_the_likeliest(rig: Rig) -> None:
    rig.core.answer = "hi you"
    [answer] = await both_ways(rig, CHAT_PATH, CHAT)
    first = answer.entries[0]
    assert list(first) == ["token", "logprob", "bytes", "top_logprobs"]
    assert first["token"].encode() == bytes(first["bytes"])
    assert first["logprob"] == -1.0
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -1.0, -30.0]
    assert first["top_logprobs"][1] == {key: first[key] for key in ("token", "logprob", "bytes")}
    assert "".join(entry["token"] for entry in answer.entries) == answer.text == "hi you"
    assert rig.core.added[0].params.logprobs == 3


async def test_a_completion_states_lists_of_one_length(rig: Rig) -> None:
    rig.core.answer = "hi you"
    [answer] = await both_ways(rig, COMPLETION_PATH, PROMPT)
    assert "".join(entry["token"] for entry in answer.entries) == answer.text
    assert [entry["logprob"] for entry in answer.entries] == [-1.0 - index for index in range(len(answer.entries))]
    for entry in answer.entries:
        assert answer.text[entry["offset"] :].startswith(entry["token"])
        assert len(entry["top"]) == 3
        assert entry["top"][entry["token"]] == entry["logprob"]


async def test_a_completion_s_chosen_token_is_always_among_the_top(rig: Rig) -> None:
    [answer] = await both_ways(rig, COMPLETION_PATH, PROMPT | {"logprobs": 1})
    assert all(list(entry["top"].values()) == [-0.25, entry["logprob"]] for entry in answer.entries)
    [answer] = await both_ways(rig, COMPLETION_PATH, PROMPT | {"logprobs": 0})
    assert all(entry["top"] == {entry["token"]: entry["logprob"]} for entry in answer.entries)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_without_the_field_there_are_none(rig: Rig, path: str, body: dict[str, Any]) -> None:
    plain = {name: value for name, value in body.items() if "logprobs" not in name}
    response = await rig.post(path, plain)
    assert response.json()["choices"][0]["logprobs"] is None
    assert rig.core.added[0].params.logprobs is None
    [answer] = await both_ways(rig, path, plain)
    assert answer.entries == []


async def test_a_chat_without_top_logprobs_lists_none(rig: Rig) -> None:
    [answer] = await both_ways(rig, CHAT_PATH, {name: CHAT[name] for name in ("model", "messages", "logprobs")})
    assert answer.entries
    assert all(entry["top_logprobs"] == [] for entry in answer.entries)


async def test_the_bytes_of_parts_of_characters_join_to_the_text(rig: Rig) -> None:
    rig.core.answer = EMOJI
    num_tokens = len(rig.core.encode(EMOJI))
    [answer] = await both_ways(rig, CHAT_PATH, CHAT)
    assert len(answer.entries) == num_tokens > 2 * len(EMOJI)
    assert b"".join(bytes(entry["bytes"]) for entry in answer.entries).decode() == answer.text == EMOJI
    assert "\ufffd" not in "".join(entry["token"] for entry in answer.entries)
    assert answer.entries[0]["token"].startswith("\\xf0")
    [answer] = await both_ways(rig, COMPLETION_PATH, PROMPT)
    assert answer.entries[0]["token"].startswith("bytes:\\xf0")
    offsets = [entry["offset"] for entry in answer.entries]
    assert offsets == sorted(offsets)
    assert set(offsets) == set(range(len(EMOJI)))


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_an_answer_cut_in_a_character_has_all_its_entries(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.core.answer = rig.core.encode("a\U0001f3c4")[:-1]
    [answer] = await both_ways(rig, path, body | {"max_tokens": len(rig.core.answer)})
    assert (answer.text, answer.finish, len(answer.entries)) == ("a\ufffd", "length", len(rig.core.answer))


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stop", ["DEFGHIJ", "D", "A", "C", "zzz", ["EFGHIJ", "CDE"]])
async def test_a_stop_string_takes_the_entries_of_its_own_tokens_along(
    rig: Rig, path: str, body: dict[str, Any], stop: str | list[str]
) -> None:
    rig.core.answer = "ABCDEFGHIJ and more"
    [answer] = await both_ways(rig, path, body | {"stop": stop})
    ids = rig.core.encode(rig.core.answer)
    texts = [entry["token"] for entry in answer.entries]
    joined = "".join(texts)
    # the tokens that the text touches, no more and no fewer
    assert joined.startswith(answer.text)
    assert len("".join(texts[:-1])) < max(len(answer.text), 1)
    assert len(answer.entries) <= len(ids)
    if stop == "zzz":
        assert (joined, len(answer.entries)) == (rig.core.answer, len(ids))


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_entries_of_text_that_is_held_back_come_with_it_and_once(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    rig.core.answer, rig.core.pace_s = "abcabcabcabd", 0.002
    response = await rig.post(path, body | {"stop": "abcabd!", "stream": True})
    tokens = [entry["token"] for entry in read_whole(await rig.post(path, body))[0].entries]
    starts = [len("".join(tokens[:index])) for index in range(len(tokens))]
    answer = Answer()
    for block in response.text.split("\n\n"):
        if block.startswith("data: {"):
            answer.add(json.loads(block.removeprefix("data: "))["choices"][0])
            assert len(answer.entries) == sum(start < len(answer.text) for start in starts)
    assert answer.text == rig.core.answer
    assert [entry["token"] for entry in answer.entries] == tokens


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_choices_have_their_own_entries(rig: Rig, path: str, body: dict[str, Any]) -> None:
    answers = await both_ways(rig, path, body | {"n": 3})
    assert [len(answer.entries) for answer in answers] == [len(rig.core.encode("hello world"))] * 3


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_token_without_text_has_a_name_and_no_bytes(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.core.answer = [*rig.core.encode("a"), 0, *rig.core.encode("b"), 0]
    [answer] = await both_ways(rig, path, body | {"ignore_eos": True})
    assert answer.text == "ab"
    names = [entry["token"] for entry in answer.entries]
    assert (len(names), names[1], names[3]) == (4, names[1], names[1])
    assert names[1].startswith("<")
    assert [entry.get("bytes", []) for entry in answer.entries][1] == []


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_an_answer_of_nothing_has_empty_lists(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.core.answer = []
    [choice] = (await rig.post(path, body)).json()["choices"]
    assert set(choice["logprobs"]) in (
        {"content", "refusal"},
        {"tokens", "token_logprobs", "top_logprobs", "text_offset"},
    )
    assert read_entries(choice["logprobs"]) == []


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_minus_infinity_is_a_number(
    rig: Rig, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    low = TokenLogprobs(float("-inf"), [(5, float("-inf")), (6, float("nan"))])
    monkeypatch.setattr("scripted_core.build_logprobs", lambda num_top, *_: [low] if num_top else [])
    response = await rig.post(path, body)
    # a strict reader: Infinity and NaN are no JSON
    answer = json.loads(response.text, parse_constant=pytest.fail)
    entry = read_entries(answer["choices"][0]["logprobs"])[0]
    assert entry["logprob"] == -9999.0
    top = entry["top"].values() if "top" in entry else [item["logprob"] for item in entry["top_logprobs"]]
    assert set(top) == {-9999.0}


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_what_is_too_large_at_once_must_be_streamed(
    rig: Rig, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "MAX_WHOLE_LOGPROBS", 4 * 3 * 20)
    assert (await rig.post(path, body | {"max_tokens": 20, "n": 3})).status_code == 200
    refused = await rig.post(path, body | {"max_tokens": 21, "n": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert (await rig.post(path, body | {"max_tokens": 21, "n": 3, "stream": True})).status_code == 200


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_penalties_and_biases_reach_the_core(rig: Rig, path: str, body: dict[str, Any]) -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": 3, "5": -100, "6": 0},
    }
    assert (await rig.post(path, body | fields)).status_code == 200
    params = rig.core.added[0].params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1.0, 1.2)
    assert params.logit_bias == ((5, -100.0), (7, 3.0))


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_bias_outside_the_vocabulary_is_refused_by_name(rig: Rig, path: str, body: dict[str, Any]) -> None:
    for token_id in ("2000", "999999999"):
        refused = await rig.post(path, body | {"logit_bias": {token_id: 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
    assert (await rig.post(path, body | {"logit_bias": {"1999": 1}})).status_code == 200
    assert len(rig.core.added) == 1
