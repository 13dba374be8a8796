"""Prompts in answers: echoed text with its log-probabilities, and `prompt_logprobs`, against a scripted core."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from loraplex_engine.server import spec
from loraplex_engine.server.choice import Choice
from loraplex_engine.server.echo import SLICE, PromptPart
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire.messages import AddRequest, ErrorInfo, SamplingParams, TokenEvent
from scripted_core import BASE, Rig, build_prompt_logprobs, running_rig
from toy_tokenizers import byte_level, write_byte_level, write_folder, write_sentencepiece

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
TEXT = "The fox \U0001fae0 नमस्ते says <|im_end|>"
PROMPT: dict[str, Any] = {"model": BASE, "prompt": TEXT, "max_tokens": 100}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


async def stream(rig: Rig, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await rig.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


async def complete(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a completion, which are the same streamed."""
    whole = await rig.post(COMPLETION_PATH, body)
    assert whole.status_code == 200, whole.text
    choices: list[dict[str, Any]] = whole.json()["choices"]
    joined: dict[int, dict[str, Any]] = {}
    for event in await stream(rig, COMPLETION_PATH, body):
        _add(joined, event["choices"][0])
    assert [joined[index] for index in sorted(joined)] == choices
    return choices


def _add(joined: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    found = joined.setdefault(piece["index"], piece)
    if found is piece:
        return
    assert "prompt_logprobs" not in piece
    found["text"] += piece["text"]
    found["finish_reason"] = piece["finish_reason"]
    if piece["logprobs"] is not None:
        if found["logprobs"] is None:
            found["logprobs"] = {name: [] for name in piece["logprobs"]}
        for name, values in piece["logprobs"].items():
            found["logprobs"][name] += values


async def test_an_echo_is_the_prompt_as_it_was_sent_and_the_answer(rig: Rig) -> None:
    [choice] = await complete(rig, PROMPT | {"echo": True})
    assert choice["text"] == TEXT + "hello world"
    assert choice["logprobs"] is None


async def test_echoed_ids_are_decoded_and_a_character_may_go_on_in_the_answer(rig: Rig) -> None:
    ids = rig.core.encode("so \U0001f3c4")
    rig.core.answer = [ids[-1], *rig.core.encode("!")]
    [choice] = await complete(rig, PROMPT | {"prompt": ids[:-1], "echo": True, "logprobs": 1})
    assert choice["text"] == "so \U0001f3c4!"
    assert choice["logprobs"]["text_offset"][-2:] == [3, 4]


async def test_no_tokens_are_an_answer_to_an_echo(rig: Rig) -> None:
    response = await rig.post(COMPLETION_PATH, PROMPT | {"echo": True, "max_tokens": 0})
    [choice] = await complete(rig, PROMPT | {"echo": True, "max_tokens": 0, "logprobs": 2})
    assert choice["text"] == TEXT == response.json()["choices"][0]["text"]
    assert choice["finish_reason"] == "length"
    usage = response.json()["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(rig.core.encode(TEXT)))


async def test_a_prompt_may_fill_the_context_when_no_token_is_wanted(rig: Rig) -> None:
    ids = [5] * rig.core.facts.max_model_len
    body = PROMPT | {"prompt": ids, "echo": True, "max_tokens": 0}
    assert (await rig.post(COMPLETION_PATH, body)).status_code == 200
    assert (await rig.post(COMPLETION_PATH, body | {"prompt": [*ids, 5]})).status_code == 400


async def test_log_probabilities_of_an_echo_begin_with_the_prompt_s(rig: Rig) -> None:
    [choice] = await complete(rig, PROMPT | {"echo": True, "logprobs": 2})
    logprobs, size = choice["logprobs"], len(rig.core.encode(TEXT))
    assert {len(values) for values in logprobs.values()} == {size + len(rig.core.encode("hello world"))}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:4] == [-1.0, -2.0, -3.0]
    assert logprobs["token_logprobs"][size] == -1.0
    assert rig.core.added[0].params.prompt_logprobs == 2
    rebuilt = b""
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == len(rebuilt.decode(errors="ignore"))
        rebuilt += eval(f"b'{token[6:]}'") if token.startswith("bytes:") else token.encode()
    assert rebuilt.decode() == choice["text"]


async def test_an_added_token_and_a_prefix_space_have_no_place_of_their_own(tmp_path: Path) -> None:
    async with running_rig(tmp_path, write_sentencepiece(tmp_path / "base")) as rig:
        body = PROMPT | {"prompt": "hello fox", "echo": True, "logprobs": 0}
        [choice] = await complete(rig, body)
        assert choice["text"].startswith("hello fox")
        assert choice["logprobs"]["tokens"][0] == "<s>"
        assert choice["logprobs"]["text_offset"][:2] == [0, 0]
        assert "".join(choice["logprobs"]["tokens"][1:]) == choice["text"]


async def test_a_long_echo_comes_in_slices(rig: Rig) -> None:
    text = "the fox " * 70
    events = await stream(rig, COMPLETION_PATH, PROMPT | {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 5})
    size = len(rig.core.encode(text))
    assert size > SLICE
    counts = [len(event["choices"][0]["logprobs"]["tokens"]) for event in events if event["choices"][0]["text"]]
    assert counts[:2] == [SLICE, size - SLICE]


async def test_only_the_first_choice_of_a_prompt_is_scored_and_all_tell_it(rig: Rig) -> None:
    body = PROMPT | {"prompt": ["hello", "the fox"], "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choices = await complete(rig, body)
    assert [choice["text"] for choice in choices] == ["hellohello world"] * 3 + ["the foxhello world"] * 3
    assert choices[0]["logprobs"] == choices[2]["logprobs"]
    assert len(choices[5]["prompt_logprobs"]) == len(rig.core.encode("the fox"))
    sent = sorted(rig.core.added[:6], key=lambda request: request.request_id)
    assert [request.params.prompt_logprobs for request in sent] == [3, None, None] * 2


def test_a_choice_waits_for_the_scores_that_its_sibling_brings(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_level(tmp_path / "base"))
    part = PromptPart([5, 6], "xy", (0, 1), is_text=True, has_scores=True)
    first, second = (
        Choice(
            index,
            AddRequest(str(index), [5, 6], SamplingParams(9, prompt_logprobs=None if index else 0)),
            part.build_detokenizer(tokenizer.table),
            (),
            prompt=part,
        )
        for index in range(2)
    )
    [token] = tokenizer.encode_prompt("a")
    second.feed(TokenEvent("1", [token]))
    assert second.take() is None
    first.feed(TokenEvent("0", [token], prompt_logprobs=build_prompt_logprobs(0, [5, 6])))
    for choice in (first, second):
        update = choice.take()
        assert update is not None
        assert (update.text, update.prompt) == ("a", part)
        assert choice.take() is None


async def test_an_error_of_the_scored_choice_ends_its_siblings(rig: Rig) -> None:
    rig.core.errors = {1: ErrorInfo("internal_error", "no")}
    body = PROMPT | {"prompt": "hello", "n": 2, "echo": True, "logprobs": 1}
    assert (await rig.post(COMPLETION_PATH, body)).status_code == 500


async def test_prompt_logprobs_of_a_completion_are_its_choices(rig: Rig) -> None:
    [choice] = await complete(rig, PROMPT | {"prompt_logprobs": 2})
    ids = rig.core.encode(TEXT)
    assert choice["text"] == "hello world"
    assert choice["logprobs"] is None
    listed = choice["prompt_logprobs"]
    assert len(listed) == len(ids)
    assert listed[0] is None
    assert list(listed[1]) == [str(ids[1]), "5"]
    assert listed[1][str(ids[1])] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": listed[1][str(ids[1])]["decoded_token"],
    }
    assert listed[1]["5"]["rank"] == 1


async def test_a_token_that_is_not_among_the_likeliest_has_no_rank(rig: Rig) -> None:
    [choice] = await complete(rig, PROMPT | {"prompt_logprobs": 0})
    assert [entry["rank"] for entry in choice["prompt_logprobs"][1].values()] == [None]


async def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(rig: Rig) -> None:
    body = CHAT | {"prompt_logprobs": 1, "n": 2, "logprobs": True}
    whole = (await rig.post(CHAT_PATH, body)).json()
    assert whole["choices"][0]["message"]["content"] == "hello world"
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    events = await stream(rig, CHAT_PATH, body)
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [whole["prompt_logprobs"]]
    assert all(event["choices"] for event in events)
    plain = (await rig.post(CHAT_PATH, CHAT)).json()
    assert "prompt_logprobs" not in plain


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_may_not_have_too_many_log_probabilities(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    size = len(rig.core.encode(TEXT))
    monkeypatch.setattr(spec, "MAX_PROMPT_LOGPROBS", size * 3)
    for fields, param in (({"prompt_logprobs": 3}, "prompt_logprobs"), ({"echo": True, "logprobs": 3}, "logprobs")):
        response = await rig.post(COMPLETION_PATH, PROMPT | fields | {"stream": is_stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert not rig.core.added
    assert (await rig.post(COMPLETION_PATH, PROMPT | {"prompt_logprobs": 2})).status_code == 200


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
async def test_a_salt_reaches_the_core(rig: Rig, prompt_logprobs: int | None) -> None:
    await rig.post(COMPLETION_PATH, PROMPT | {"cache_salt": "s", "prompt_logprobs": prompt_logprobs})
    await rig.post(CHAT_PATH, CHAT | {"cache_salt": "s"})
    await rig.post(CHAT_PATH, CHAT)
    assert [request.cache_salt for request in rig.core.added] == ["s", "s", ""]


async def test_the_gateway_s_salt_and_the_client_s_are_told_apart(rig: Rig) -> None:
    for gateway, client in (("a", "b"), ("ab", ""), ("", "ab"), ("", "a")):
        headers = {"x_loraplex_cache_salt": gateway} if gateway else {}
        assert (await rig.post(CHAT_PATH, CHAT | {"cache_salt": client}, **headers)).status_code == 200
    assert len({request.cache_salt for request in rig.core.added}) == 4


def test_tokens_begin_where_their_text_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_level(tmp_path / "base"))
    text = "a \U0001f3c4 e\u0301 b"
    starts = tokenizer.find_starts(text)
    assert starts == sorted(starts)
    assert len(starts) == len(tokenizer.encode_prompt(text))
    assert text[starts[-1] :].strip() == "b"


def test_spaces_that_a_tokenizer_does_not_count_belong_to_their_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = Tokenizer(write_folder(tmp_path, backend, {}, None))
    text = "hello world, how are you?"
    assert any(text[first - 1] == " " for first, _ in backend.encode(text).offsets if first), "the offsets are trimmed"
    starts = tokenizer.find_starts(text)
    ends = [*starts[1:], len(text)]
    pieces = [text[start:end].encode() for start, end in zip(starts, ends, strict=True)]
    assert pieces == [tokenizer.table.get(token) for token in tokenizer.encode_prompt(text)]
