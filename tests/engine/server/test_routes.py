"""The generation routes over HTTP, against a scripted core."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex_engine.wire.messages import ErrorInfo
from scripted_core import BASE, DIGEST, Rig, opened_stream, running_rig, sign, until, until_heard
from toy_tokenizers import write_byte_level

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": BASE, "prompt": "hi", "max_tokens": 100}
BOTH = [(CHAT_PATH, CHAT), (COMPLETION_PATH, PROMPT)]
EMOJI = "\U0001fae0\U0001f979龜\U0001f468\u200d\U0001f469\u200d\U0001f467 नमस्ते"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


def data_events(body: str) -> list[Any]:
    events = [block for block in body.split("\n\n") if block]
    datas = [block.removeprefix("data: ") for block in events if block.startswith("data: ")]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    if "message" in choice:
        return str(choice["message"]["content"])
    return str(choice["delta"].get("content", "")) if "delta" in choice else str(choice["text"])


async def both_ways(rig: Rig, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The same request not streamed and streamed."""
    whole = await rig.post(path, body)
    streamed = await rig.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    return whole.json(), data_events(streamed.text)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_stream_and_whole_answer_agree(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.core.answer = "Paris, of course. " + EMOJI
    whole, events = await both_ways(rig, path, body)
    deltas = [text_of(event["choices"][0]) for event in events[:-1]]
    assert "".join(deltas) == text_of(whole["choices"][0]) == rig.core.answer
    assert "\ufffd" not in "".join(deltas)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == whole["choices"][0]["finish_reason"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_an_answer_cut_in_a_character_ends_with_one_replacement_both_ways(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    rig.core.answer = rig.core.encode("a\U0001f3c4")[:-1]
    whole, events = await both_ways(rig, path, body | {"max_tokens": len(rig.core.answer)})
    assert text_of(whole["choices"][0]) == "a\ufffd"
    assert "".join(text_of(event["choices"][0]) for event in events[:-1]) == "a\ufffd"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == len(rig.core.answer)


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["zzz", "DEFGHIJ"], ["EFGHIJ", "DE"], "D"])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_stop_string_ends_the_text_and_the_core(
    rig: Rig, path: str, body: dict[str, Any], stop: str | list[str]
) -> None:
    rig.core.answer = "ABCDEFGHIJ and much more that nobody wants"
    whole, events = await both_ways(rig, path, body | {"stop": stop})
    assert text_of(whole["choices"][0]) == "ABC"
    assert "".join(text_of(event["choices"][0]) for event in events[:-1]) == "ABC"
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_tokens_are_counted_up_to_the_one_that_completed_the_stop_string(rig: Rig) -> None:
    rig.core.answer = "ABCDEFGHIJ" * 5
    rig.core.pace_s = 0.001
    answer = (await rig.post(COMPLETION_PATH, PROMPT | {"stop": "D"})).json()
    ids = rig.core.encode(rig.core.answer)
    to_stop = next(count for count in range(1, 20) if "D" in decode(rig, ids[:count]))
    assert answer["usage"]["completion_tokens"] == to_stop
    await until(lambda: rig.core.num_running == 0)
    assert [reason for _, reason in rig.core.aborted] == ["stop"]


def decode(rig: Rig, ids: list[int]) -> str:
    return b"".join(rig.front._tokenizer.table.get(token) for token in ids).decode(errors="replace")


async def test_min_tokens_come_before_any_stop_string(rig: Rig) -> None:
    rig.core.answer = "DDDDDD D"
    ids = rig.core.encode("DDDDDD D")
    answer = (await rig.post(COMPLETION_PATH, PROMPT | {"stop": "D", "min_tokens": len(ids)})).json()
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["choices"][0]["text"] == decode(rig, ids[:-1]) + decode(rig, ids[-1:]).removesuffix("D")


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
async def test_usage_is_streamed_only_if_asked_for(rig: Rig, options: dict[str, Any]) -> None:
    events = data_events((await rig.post(CHAT_PATH, CHAT | {"stream": True} | options)).text)
    assert all(event["choices"] and "usage" not in event for event in events)


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, PROMPT)])
async def test_where_usage_is_asked_for_every_other_chunk_has_null(rig: Rig, path: str, body: dict[str, Any]) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "prompt_logprobs": 1}
    *events, last = data_events((await rig.post(path, body | asked)).text)
    assert len(events) >= 6
    assert all(event["choices"] and event["usage"] is None for event in events)
    assert any("prompt_logprobs" in text for text in map(str, events))
    assert (last["choices"], last["usage"]["completion_tokens"] > 1) == ([], True)


async def test_n_choices_of_several_prompts_are_ordered_and_counted_once(rig: Rig) -> None:
    rig.core.cached_tokens = 1
    answer = (await rig.post(COMPLETION_PATH, PROMPT | {"prompt": ["hi", "hello"], "n": 3, "seed": 7})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    sizes = [len(rig.core.encode(text)) for text in ("hi", "hello")]
    assert answer["usage"]["prompt_tokens"] == sum(sizes)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    sent = sorted(rig.core.added, key=lambda request: request.request_id)
    assert [request.params.choice for request in sent] == [0, 1, 2, 0, 1, 2]
    assert {request.params.seed for request in sent} == {7}


async def test_without_a_seed_each_request_gets_its_own(rig: Rig) -> None:
    for _ in range(3):
        await rig.post(CHAT_PATH, CHAT)
    assert len({request.params.seed for request in rig.core.added}) == 3


async def test_a_streamed_chat_opens_each_choice_with_the_role(rig: Rig) -> None:
    events = data_events((await rig.post(CHAT_PATH, CHAT | {"stream": True, "n": 2})).text)
    for index in (0, 1):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}


async def test_the_prompt_reaches_the_core_as_the_template_says(rig: Rig) -> None:
    await rig.post(
        CHAT_PATH,
        CHAT
        | {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
    )
    text = "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>assistant\n"
    expected = rig.front._tokenizer.encode_prompt(text, add_special_tokens=False)
    assert rig.core.added[0].prompt_ids == expected


async def test_ids_may_be_a_prompt(rig: Rig) -> None:
    answers = [
        (await rig.post(COMPLETION_PATH, PROMPT | {"prompt": prompt})).status_code for prompt in ([5, 6], [[5], [6, 7]])
    ]
    assert answers == [200, 200]
    assert [request.prompt_ids for request in rig.core.added] == [[5, 6], [5], [6, 7]]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], [2000], [-1], [True], [1.5], ["a", 1], [None], 5, ["a"] * 17, [[1], "a"]]
)
async def test_a_bad_prompt_is_refused(rig: Rig, prompt: Any) -> None:
    answer = await rig.post(COMPLETION_PATH, PROMPT | {"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_sampling_fields_reach_the_core(rig: Rig) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 11,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
    }
    await rig.post(
        CHAT_PATH,
        CHAT | fields | {"max_tokens": 20, "model": DIGEST},
        x_loraplex_tenant_id="t-9",
        x_loraplex_deadline_ms="5000",
    )
    request = rig.core.added[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 11)
    assert (params.ignore_eos, params.min_tokens, params.stop_token_ids, params.max_tokens) == (True, 2, (9,), 20)
    assert (request.digest, request.tenant_id) == (DIGEST, "t-9")
    # less what it took until now
    assert 4 < request.deadline_s < 5


@pytest.mark.parametrize("top_k", [-1, 0, 2000, 9_999_999, 2**70, 10**400], ids=lambda value: str(value)[:20])
async def test_a_top_k_of_the_whole_vocabulary_is_off(rig: Rig, top_k: int) -> None:
    assert rig.core.facts.vocab_size == 2000
    for path, body in BOTH:
        assert (await rig.post(path, body | {"top_k": top_k})).status_code == 200
    assert {request.params.top_k for request in rig.core.added} == {0}
    await rig.post(CHAT_PATH, CHAT | {"top_k": 1999})
    assert rig.core.added[-1].params.top_k == 1999


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, 10**4000, -(2**70)], ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    "name",
    ["max_tokens", "min_tokens", "temperature", "top_p", "min_p", "n", "seed", "stop_token_ids", "prompt", "metadata"],
)
async def test_a_number_that_fits_nowhere_is_refused_by_name(rig: Rig, name: str, value: int) -> None:
    body = PROMPT | {"max_tokens": 10} | {name: [value] if name in ("stop_token_ids", "prompt") else value}
    answer = await rig.post(COMPLETION_PATH, body)
    if name == "seed" and abs(value) < 2**63:
        assert answer.status_code == 200
        return
    named = "prompt" if name == "max_tokens" and value > 0 else name
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert len(answer.content) < 600
    assert (rig.core.added, rig.client.num_open, rig.front.log.num_open) == ([], 0, 0)


async def test_a_tiny_temperature_is_taken(rig: Rig) -> None:
    assert (await rig.post(CHAT_PATH, CHAT | {"temperature": 1e-300})).status_code == 200


async def test_a_call_may_ask_for_128_answers_in_all(rig: Rig) -> None:
    several = PROMPT | {"prompt": ["hi"] * 16, "max_tokens": 1}
    refused = await rig.post(COMPLETION_PATH, several | {"n": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert rig.core.added == []
    answer = await rig.post(COMPLETION_PATH, several | {"n": 8})
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 128)


async def test_max_tokens_defaults_to_the_rest_for_chats_and_16_for_completions(rig: Rig) -> None:
    await rig.post(CHAT_PATH, CHAT)
    await rig.post(COMPLETION_PATH, {"model": BASE, "prompt": "hi"})
    chat, completion = rig.core.added
    assert chat.params.max_tokens == 256 - len(chat.prompt_ids)
    assert completion.params.max_tokens == 16


@pytest.mark.parametrize(
    ("size", "max_tokens", "status"),
    [
        (255, 1, 200),
        (255, None, 200),
        (256, None, 400),
        (257, 1, 400),
        (200, 57, 400),
        (200, 56, 200),
        (1, 10**12, 400),
    ],
)
async def test_the_context_is_a_typed_limit(rig: Rig, size: int, max_tokens: int | None, status: int) -> None:
    answer = await rig.post(COMPLETION_PATH, {"model": BASE, "prompt": [5] * size, "max_tokens": max_tokens})
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(size) in error["message"]
        assert "256" in error["message"]
        assert ("max_tokens" in error["message"]) == (size < 256)
        assert rig.core.added == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_length_that_does_not_fit_is_refused_by_the_name_it_was_sent_with(rig: Rig, name: str) -> None:
    error = (await rig.post(CHAT_PATH, CHAT | {"max_tokens": None, name: 1000})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"and `{name}` asks for 1000; lower it to " in error["message"]
    lower = int(error["message"].split("lower it to ")[1].split()[0])
    statuses = [
        (await rig.post(CHAT_PATH, CHAT | {"max_tokens": None, name: most})).status_code for most in (lower, lower + 1)
    ]
    assert statuses == [200, 400]


async def test_a_hopelessly_long_prompt_is_refused_without_tokenising(rig: Rig) -> None:
    messages = [{"role": "user", "content": "ab " * 500_000}]
    started = asyncio.get_running_loop().time()
    answer = await rig.post(CHAT_PATH, CHAT | {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert asyncio.get_running_loop().time() - started < 2


async def test_a_body_above_4_mib_is_413(rig: Rig) -> None:
    answer = await rig.post(CHAT_PATH, b" " * ((4 << 20) + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * (1 << 20)

    answer = await rig.http.post(CHAT_PATH, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "body",
    [b'{"model":"\xff"}', b'{"model":"\\ud83d"}', b'{"model":"tiny","model":"tiny"}', b"{", b"[]", b"\xef\xbb\xbf{}"],
)
async def test_what_is_not_strict_json_is_400_in_ascii(rig: Rig, body: bytes) -> None:
    answer = await rig.post(CHAT_PATH, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert answer.content.isascii()


async def test_a_body_that_stalls_is_408(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_registry.http.hardened.BODY_IDLE_S", 0.1)

    async def stalling() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    answer = await rig.http.post(CHAT_PATH, content=stalling(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


async def test_another_media_type_is_415(rig: Rig) -> None:
    answer = await rig.http.post(CHAT_PATH, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415


@pytest.mark.parametrize("model", ["team-y", "Tiny", "tiny ", "sha256:abc", DIGEST.upper()])
async def test_an_unknown_model_is_404_and_never_the_base(rig: Rig, model: str) -> None:
    for path, body in BOTH:
        answer = await rig.post(path, body | {"model": model})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert rig.core.added == []


async def test_the_answer_names_the_model_as_the_gateway_says(rig: Rig) -> None:
    answer = await rig.post(CHAT_PATH, CHAT | {"model": DIGEST}, x_loraplex_echo_model="acme/bot")
    assert answer.json()["model"] == "acme/bot"
    assert answer.headers["x-loraplex-digest"] == DIGEST


async def test_an_error_before_the_first_token_is_the_whole_answer(rig: Rig) -> None:
    rig.core.errors = {0: ErrorInfo("queue_full", "Too many wait.", 3)}
    for body in (CHAT, CHAT | {"stream": True}, CHAT | {"n": 3}):
        answer = await rig.post(CHAT_PATH, body, x_loraplex_done="1")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert answer.json()["error"] == {
            "message": "Too many wait.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        done = json.loads(answer.headers["x-loraplex-done"])
        assert (done["finish"], done["prompt_tokens"], done["completion_tokens"]) == ("error", 0, 0)


async def test_an_error_in_the_middle_is_an_error_event_and_no_end(rig: Rig) -> None:
    rig.core.answer, rig.core.pace_s = "hello world hello world hello world", 0.02
    rig.core.errors = {3: ErrorInfo("adapter_output_invalid", "Non-finite.", None)}
    answer = await rig.post(CHAT_PATH, CHAT | {"stream": True}, x_loraplex_done="1")
    blocks = answer.text.split("\n\n")
    assert answer.status_code == 200
    assert blocks[-3].startswith("event: loraplex.done\ndata: ")
    done = json.loads(blocks[-3].split("data: ")[1])
    assert json.loads(blocks[-2].removeprefix("data: "))["error"]["code"] == "adapter_output_invalid"
    assert (done["finish"], done["completion_tokens"]) == ("error", 3)
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"' not in answer.text
    whole = await rig.post(CHAT_PATH, CHAT, x_loraplex_done="1")
    assert whole.status_code == 500


async def test_a_lost_core_is_502_or_an_error_event_and_the_next_one_serves(rig: Rig) -> None:
    rig.core.hangs_after = 2
    whole = asyncio.create_task(rig.post(CHAT_PATH, CHAT))
    stream = asyncio.create_task(rig.post(CHAT_PATH, CHAT | {"stream": True}))
    await until(lambda: rig.core.num_running == 2)
    await asyncio.sleep(0.05)
    await rig.kill_core()
    assert (await whole).json()["error"]["code"] == "replica_failed"
    assert (await whole).status_code == 502
    assert '"code": "replica_failed"' in (await stream).text
    refused = await rig.post(CHAT_PATH, CHAT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert (await rig.http.get("/readyz")).status_code == 503
    assert (await rig.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("hangs_after", [0, 2])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_away_is_aborted_in_every_phase(rig: Rig, hangs_after: int, is_stream: bool) -> None:
    rig.core.hangs_after = hangs_after
    request = asyncio.create_task(
        rig.post(CHAT_PATH, CHAT | {"stream": is_stream, "n": 2}, x_loraplex_request_id="req_a")
    )
    await until(lambda: rig.core.num_running == 2)
    await until_heard(rig, 2 * hangs_after)
    request.cancel()
    await until(lambda: rig.core.num_running == 0, 10)
    await until(lambda: rig.front.log.num_open == 0)
    assert sorted(rig.core.aborted) == [("req_a-0", "abort"), ("req_a-1", "abort")]
    done = (await rig.http.get("/internal/requests/req_a")).json()["done"]
    assert (done["finish"], done["completion_tokens"]) == ("abort", 2 * hangs_after)
    assert (done["prompt_tokens"] == 0) == (hangs_after == 0)


async def test_a_normal_end_sends_no_abort(rig: Rig) -> None:
    await asyncio.gather(*(rig.post(CHAT_PATH, CHAT | {"stream": bool(i % 2)}) for i in range(40)))
    for _ in range(3):
        async with opened_stream(rig, CHAT_PATH, CHAT) as response:
            await response.aread()
    assert rig.core.aborted == []
    assert "loraplex_front_aborts_total 0.0" in (await rig.http.get("/metrics")).text


async def test_the_deadline_is_504_before_and_an_event_after_the_first_token(rig: Rig) -> None:
    rig.core.hangs_after = 0
    answer = await rig.post(CHAT_PATH, CHAT, x_request_timeout="0.1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    rig.core.hangs_after = 2
    answer = await rig.post(CHAT_PATH, CHAT | {"stream": True}, x_loraplex_deadline_ms="200")
    assert (answer.status_code, '"code": "deadline_exceeded"' in answer.text) == (200, True)
    await until(lambda: rig.core.num_running == 0)


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
async def test_a_malformed_timeout_is_refused_by_name(rig: Rig, value: str) -> None:
    answer = await rig.post(CHAT_PATH, CHAT, x_request_timeout=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_the_done_event_comes_only_when_asked_for(rig: Rig) -> None:
    asked = await rig.post(CHAT_PATH, CHAT | {"stream": True}, x_loraplex_done="1")
    blocks = asked.text.split("\n\n")
    assert blocks[-3].startswith("event: loraplex.done\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    plain = await rig.post(CHAT_PATH, CHAT | {"stream": True})
    assert "loraplex" not in plain.text
    assert "x-loraplex-done" not in (await rig.post(CHAT_PATH, CHAT)).headers


async def test_nothing_is_sent_before_the_first_token(rig: Rig) -> None:
    rig.core.pace_s = 0.3
    started = asyncio.get_running_loop().time()
    async with opened_stream(rig, CHAT_PATH, CHAT) as response:
        assert response.status_code == 200
        assert asyncio.get_running_loop().time() - started >= 0.3


async def test_a_reader_that_stops_is_aborted_and_cut_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_registry.http.protocol.WRITE_TIMEOUT_S", 0.3)
    rig.core.answer = rig.core.encode("x" * 1000) * 400
    rig.client.facts = msgspec.structs.replace(rig.core.facts, max_model_len=10_000_000)
    body = json.dumps(PROMPT | {"stream": True, "max_tokens": 5_000_000}).encode()
    lines = [f"POST {COMPLETION_PATH} HTTP/1.1", "host: e", f"authorization: Bearer {sign()}"]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
    loop, hang_up = asyncio.get_running_loop(), select.poll()
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        hang_up.register(client, select.POLLHUP)
        await loop.sock_connect(client, rig.uds)
        await loop.sock_sendall(client, "\r\n".join(lines).encode() + body)
        assert await loop.sock_recv(client, 15) == b"HTTP/1.1 200 OK"
        await until(lambda: rig.core.aborted)
        assert rig.core.aborted[0][1] == "abort"
        await until(lambda: rig.front.log.num_open == 0)
        # the other end is closed though nothing of what it wrote was read
        await until(lambda: hang_up.poll(0))


async def test_tokenize_equals_what_generation_sends(rig: Rig) -> None:
    await rig.post(CHAT_PATH, CHAT)
    answer = (await rig.post("/v1/tokenize", CHAT)).json()
    assert answer == {"count": len(answer["tokens"]), "max_model_len": 256, "tokens": rig.core.added[0].prompt_ids}
    assert (await rig.post("/v1/tokenize", {"model": BASE, "prompt": "hi"})).json()["tokens"] == rig.core.encode("hi")
    assert (await rig.post("/v1/tokenize", {"model": "x", "prompt": "hi"})).status_code == 404


async def test_everything_but_the_probes_needs_a_token_for_this_audience(rig: Rig) -> None:
    bad = ["", "Bearer x", f"Bearer {sign(audience='registry')}", f"Basic {sign()}"]
    paths = ["/metrics", "/internal/state", "/v1/models", "/internal/requests/x"]
    for authorization in bad:
        for path in paths:
            answer = await rig.http.get(path, headers={"authorization": authorization})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await rig.http.get("/healthz", headers={"authorization": authorization})).status_code == 200
        assert (await rig.http.post(CHAT_PATH, json=CHAT, headers={"authorization": authorization})).status_code == 401


@pytest.mark.parametrize(
    ("identity", "opened"),
    [
        ({"role": "tenant", "scopes": ("infer",)}, {"/v1/models", "/readyz"}),
        ({"role": "tenant", "scopes": ("metrics:read",)}, {"/metrics", "/readyz"}),
        ({"role": "tenant", "scopes": ()}, {"/readyz"}),
        ({"role": "admin_readonly"}, {"/metrics", "/readyz", "/internal/state"}),
        ({"role": "admin"}, {"/v1/models", "/metrics", "/readyz", "/internal/state", "/internal/requests/x/abort"}),
    ],
)
async def test_an_identity_opens_what_it_was_made_for(rig: Rig, identity: dict[str, Any], opened: set[str]) -> None:
    headers = {"authorization": f"Bearer {sign(**identity)}"}
    calls = [("GET", path) for path in ("/v1/models", "/metrics", "/readyz", "/internal/state")]
    answers = {
        path: await rig.http.request(method, path, headers=headers)
        for method, path in (*calls, ("POST", "/internal/requests/x/abort"))
    }
    refused = {path for path, answer in answers.items() if answer.status_code == 403}
    assert refused == answers.keys() - opened
    assert all(answers[path].json()["error"]["code"] == "permission_denied" for path in refused)


async def test_unknown_paths_and_methods_have_the_one_error_shape(rig: Rig) -> None:
    for answer, status in ((await rig.http.get("/nope"), 404), (await rig.http.put(CHAT_PATH), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_request_id_that_runs_already_is_a_conflict(rig: Rig) -> None:
    rig.core.hangs_after = 0
    first = asyncio.create_task(rig.post(CHAT_PATH, CHAT, x_loraplex_request_id="req_a"))
    await until(lambda: rig.core.num_running == 1)
    assert (await rig.post(CHAT_PATH, CHAT, x_loraplex_request_id="req_a")).status_code == 409
    first.cancel()
    await until(lambda: rig.core.num_running == 0)


@pytest.mark.parametrize("weight", ["0", "1001", "-1", "1.5", "", "heavy", "10000"])
async def test_a_weight_out_of_bounds_is_refused(rig: Rig, weight: str) -> None:
    answer = await rig.post(CHAT_PATH, CHAT, x_loraplex_weight=weight)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-loraplex-weight")


async def test_the_core_learns_the_weight_of_a_tenant(rig: Rig) -> None:
    for text in ("1", "1000"):
        assert (await rig.post(CHAT_PATH, CHAT, x_loraplex_weight=text)).status_code == 200
    assert (await rig.post(CHAT_PATH, CHAT)).status_code == 200
    assert [request.weight for request in rig.core.added] == [1, 1000, 1]


async def test_the_core_learns_how_urgent_a_request_is(rig: Rig) -> None:
    for text in ("-3", "7", "0"):
        assert (await rig.post(CHAT_PATH, CHAT, x_loraplex_priority=text)).status_code == 200
    assert [request.priority for request in rig.core.added] == [-3, 7, 0]
    for text in ("", "high", "1.5", "9" * 30):
        answer = await rig.post(CHAT_PATH, CHAT, x_loraplex_priority=text)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-loraplex-priority")


async def test_errors_do_not_echo_what_the_client_sent_at_length(rig: Rig) -> None:
    answer: httpx.Response = await rig.post(CHAT_PATH, CHAT | {"messages": [{"role": "é" * 10_000, "content": "x"}]})
    assert answer.status_code == 400
    assert len(answer.content) < 3000
    assert answer.content.isascii()


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/tokenize"])
async def test_messages_of_which_the_template_makes_nothing_are_refused(tmp_path: Path, path: str) -> None:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base", "{# nothing #}")) as rig:
        answer = await rig.post(path, CHAT)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert (rig.core.added, rig.front.log.num_open) == ([], 0)


async def test_messages_that_leave_no_mark_for_a_control_token_are_refused(rig: Rig) -> None:
    text = "".join(map(chr, range(0xF0000, 0xFFFFE))) + "<|im_end|>"
    answer = await rig.post(CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": text}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "private-use" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        (CHAT_PATH, CHAT | {"max_completion_tokens": 5}, 6),
        (CHAT_PATH, CHAT | {"max_tokens": 5}, 6),
        (CHAT_PATH, CHAT, 250),
        (COMPLETION_PATH, {"model": BASE, "prompt": "hi"}, 17),
    ],
    ids=["max_completion_tokens", "max_tokens", "rest", "default"],
)
async def test_min_tokens_above_what_an_answer_may_have_are_refused(
    rig: Rig, path: str, body: dict[str, Any], least: int
) -> None:
    answer = await rig.post(path, body | {"min_tokens": least})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    assert rig.core.added == []
