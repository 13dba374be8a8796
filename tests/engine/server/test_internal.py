"""The internal routes and the gateway's client of them, against a scripted core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex_engine.server import app
from loraplex_engine.server.request_log import MAX_KEPT, RequestLog
from loraplex_engine.wire import messages as wire
from loraplex_engine.wire.client import EngineClient, Events, ReplicaFailedError, UnreachableError
from loraplex_engine.wire.done import RequestDone
from scripted_core import BASE, DIGEST, Rig, running_rig, sign, until, until_heard
from toy_tokenizers import write_byte_level

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[EngineClient]:
    # what is internal is asked in the platform's name
    engine = EngineClient(
        "http://engine", lambda: sign(role="admin", tenant_id=None, tenant=None, scopes=()), uds=rig.uds
    )
    yield engine
    await engine.close()


def generate(client: EngineClient, body: dict[str, Any], **options: Any) -> Any:
    options.setdefault("headers", {"x-loraplex-request-id": "req_a"})
    return client.generate(PATH, msgspec.json.encode(body), token=sign(), deadline_s=5, **options)


async def collect(events: AsyncIterator[Events], found: list[Events]) -> None:
    """Keep what came before a failure."""
    async for piece in events:
        found.append(piece)  # noqa: PERF401 - a comprehension would lose them


async def test_the_client_reads_a_stream_and_keeps_the_done_event_to_itself(rig: Rig, client: EngineClient) -> None:
    async with generate(client, CHAT | {"stream": True}) as answer:
        events = [event async for event in answer.events()]
    assert (answer.status, answer.is_stream, answer.digest) == (200, True, "base")
    assert (events[-1].data, events[-1].is_last, events[-1].error) == (b"data: [DONE]\n\n", True, b"")
    assert not any(event.is_last or b"event:" in event.data for event in events[:-1])
    assert sum(event.count for event in events) >= 3
    assert answer.done is not None
    assert (answer.done.request_id, answer.done.finish, answer.done.completion_tokens) == ("req_a", "stop", 5)


async def test_the_client_reads_a_whole_answer(client: EngineClient) -> None:
    async with generate(client, CHAT) as answer:
        body = msgspec.json.decode(await answer.read())
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert answer.done is not None
    assert answer.header("x-loraplex-done") is None


async def test_leaving_the_client_aborts_the_request(rig: Rig, client: EngineClient) -> None:
    rig.core.hangs_after = 2
    async with generate(client, CHAT | {"stream": True}) as answer:
        async for _ in answer.events():
            break
    await until(lambda: rig.core.aborted, 10)


async def test_abort_answers_what_the_request_cost_and_again_later(rig: Rig, client: EngineClient) -> None:
    rig.core.hangs_after = 2
    reader = asyncio.create_task(rig.post(PATH, CHAT | {"stream": True}, x_loraplex_request_id="req_a"))
    await until(lambda: rig.core.num_running == 1)
    await until_heard(rig, 2)
    running = await client.find_request("req_a")
    assert running is not None
    assert (running.state, running.done.completion_tokens, running.done.finish) == ("running", 2, "")
    done = await client.abort("req_a")
    assert done is not None
    assert (done.finish, done.completion_tokens, done.queue_s, done.preemptions) == ("abort", 2, 0.25, 1)
    assert await client.abort("req_a") == done
    finished = await client.find_request("req_a")
    assert finished is not None
    assert (finished.state, finished.done) == ("finished", done)
    assert '"code": "cancelled"' in (await reader).text


async def test_what_nobody_knows_cannot_be_aborted(client: EngineClient) -> None:
    assert await client.abort("req_nobody") is None
    assert await client.find_request("req_nobody") is None


async def test_totals_are_the_sum_of_all_requests_that_ended_however_they_did(rig: Rig, client: EngineClient) -> None:
    for name, fields in (("req_0", {}), ("req_1", {"n": 2}), ("req_2", {"stop": "hello"})):
        assert (await rig.post(PATH, CHAT | fields, x_loraplex_request_id=name)).status_code == 200
    assert (await rig.post(PATH, CHAT | {"temperature": -1}, x_loraplex_request_id="req_bad")).status_code == 400
    rig.core.hangs_after = 2
    for name in ("req_3", "req_4"):
        open_one = asyncio.create_task(rig.post(PATH, CHAT | {"stream": True}, x_loraplex_request_id=name))
        await until(lambda: rig.core.num_running == 1)
        assert (await client.read_usage(60)).totals.requests == int(name[-1])
        await until_heard(rig, 2)
        await client.abort(name)
        await open_one
    report = await client.read_usage(60)
    assert [done.request_id for done in report.finished] == [f"req_{i}" for i in range(5)]
    assert [done.finish for done in report.finished] == ["stop", "stop", "stop", "abort", "abort"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes"):
        assert getattr(report.totals, name) == sum(getattr(done, name) for done in report.finished), name
    assert report.totals.completion_tokens > 0
    assert (report.totals.requests, report.totals.free_requests) == (5, 0)
    later = await client.read_usage(0)
    assert later.finished == []
    assert msgspec.structs.replace(later.totals, age_s=report.totals.age_s) == report.totals
    assert 0 < report.totals.age_s < later.totals.age_s
    assert (await client.state())["usage"]["requests"] == 5
    text = await client.metrics()
    assert f'loraplex_front_tokens_total{{kind="completion"}} {float(report.totals.completion_tokens)}' in text
    for wrong in ("x", "-1", "nan", "901"):
        assert (await rig.http.get("/internal/usage", params={"within_s": wrong})).status_code == 400


async def test_adapters_are_loaded_pinned_and_dropped(rig: Rig, client: EngineClient) -> None:
    rig.core.replies["load"] = {"tier": "slot"}
    loaded = await client.load_adapter(DIGEST, pin=True)
    assert (loaded.status_code, loaded.json()) == (200, {"digest": DIGEST, "pin": True, "tier": "slot"})
    assert (await client.drop_adapter(DIGEST)).status_code == 204
    load, drop = rig.core.calls
    assert (load.digest, load.pin, drop.digest) == (DIGEST, True, DIGEST)
    await client.load_adapter(DIGEST)
    await client.load_adapter(DIGEST, pin=False, forgive=False)
    assert [(call.pin, call.forgive) for call in rig.core.calls[2:]] == [(None, True), (False, False)]


async def test_a_load_that_fails_keeps_its_code(rig: Rig, client: EngineClient) -> None:
    rig.core.replies["load"] = wire.ErrorInfo("digest_mismatch", "Bytes differ.", 5)
    answer = await client.load_adapter(DIGEST)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "digest_mismatch")


async def test_what_a_newer_gateway_says_beside_a_load_is_passed_over(rig: Rig) -> None:
    answer = await rig.http.put(f"/internal/adapters/{DIGEST}", json={"pin": True, "urgency": "high"})
    assert answer.status_code == 200
    assert [call.pin for call in rig.core.calls] == [True]


@pytest.mark.parametrize(("digest", "body"), [("sha256:xy", {"pin": True}), (DIGEST, {"pin": 1})])
async def test_a_bad_load_is_refused(rig: Rig, digest: str, body: dict[str, Any]) -> None:
    assert (await rig.http.put(f"/internal/adapters/{digest}", json=body)).status_code == 400
    assert rig.core.calls == []


async def test_state_holds_the_core_s_and_the_front_s(rig: Rig, client: EngineClient) -> None:
    rig.core.replies["state"] = {"waiting": 3}
    state = await client.state()
    assert (state["waiting"], state["open_requests"], state["is_ready"]) == (3, 0, True)
    assert state["model"]["name"] == BASE
    await rig.kill_core()
    state = await client.state()
    assert (state["is_ready"], state["model"]) == (False, None)


async def test_metrics_are_the_core_s_and_the_front_s(rig: Rig, client: EngineClient) -> None:
    await rig.post(PATH, CHAT)
    text = await client.metrics()
    assert "core_metric 1\n" in text
    assert 'loraplex_front_requests_total{finish="stop"} 1.0' in text


async def test_draining_refuses_new_requests_and_waits_for_the_open_ones(rig: Rig, client: EngineClient) -> None:
    rig.core.pace_s, rig.core.answer = 0.05, "a b c d e f g h"
    open_one = asyncio.create_task(rig.post(PATH, CHAT))
    await until(lambda: rig.core.num_running == 1)
    drained = asyncio.create_task(client.call("POST", "/internal/drain", timeout_s=10))
    await until(lambda: rig.client.is_draining)
    refused = await rig.post(PATH, CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"] == "5"
    assert await client.is_ready() is False
    assert ((await drained).status_code, (await drained).json()) == (200, {"open_requests": 0})
    assert (await open_one).status_code == 200


async def test_draining_twice_is_draining_once_and_the_wait_is_bounded(
    rig: Rig, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "DRAIN_TIMEOUT_S", 0.1)
    rig.core.hangs_after = 2
    open_one = asyncio.create_task(rig.post(PATH, CHAT | {"stream": True}))
    await until(lambda: rig.core.num_running == 1)
    for _ in range(2):
        answer = await client.call("POST", "/internal/drain")
        assert (answer.status_code, answer.json()) == (202, {"open_requests": 1})
    state = await client.state()
    assert (state["is_draining"], state["is_ready"], state["open_requests"]) == (True, False, 1)
    assert (await rig.http.get("/readyz")).json()["error"]["code"] == "draining"
    await client.abort(rig.core.added[0].request_id.removesuffix("-0"))
    assert (await open_one).status_code == 200
    answer = await client.call("POST", "/internal/drain")
    assert (answer.status_code, answer.json()) == (200, {"open_requests": 0})


async def test_the_client_tells_no_connection_from_a_lost_one(tmp_path: Path) -> None:
    nobody = EngineClient("http://engine", sign, uds=str(tmp_path / "none"))
    with pytest.raises(UnreachableError):
        async with generate(nobody, CHAT):
            pass
    assert await nobody.is_ready() is False
    await nobody.close()


async def test_a_cut_stream_is_an_error_and_its_partial_event_is_dropped(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        for piece in (head, b"9\r\ndata: a\n\n\r\n", b"6\r\n: \n\nda\r\n", b"5\r\nta: b\r\n"):
            writer.write(piece)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, str(tmp_path / "cut"))
    client = EngineClient("http://engine", sign, uds=str(tmp_path / "cut"))
    async with generate(client, CHAT) as stream:
        events = stream.events()
        found: list[Events] = []
        with pytest.raises(ReplicaFailedError):
            await collect(events, found)
    assert b"".join(piece.data for piece in found) == b"data: a\n\n: \n\n"
    assert sum(piece.count for piece in found) == 1
    await client.close()
    server.close()


async def test_silence_longer_than_the_gap_is_an_error(rig: Rig, client: EngineClient) -> None:
    rig.core.hangs_after = 2
    async with generate(client, CHAT | {"stream": True}, gap_s=0.2) as answer:
        with pytest.raises(ReplicaFailedError):
            [event async for event in answer.events()]


def finished(request_id: str) -> RequestDone:
    return RequestDone(request_id, 1, 0, 1, 0.0, 0.0, 0.0, 0.0, 0, "stop", "base")


def test_finished_requests_are_kept_for_15_minutes() -> None:
    now = [0.0]
    log = RequestLog(lambda: now[0])
    log._file(finished("a"))
    now[0] = 899.0
    log._file(finished("b"))
    assert log.find("a") is not None
    now[0] = 901.0
    assert log.find("a") is None
    assert log.find("b") is not None


def test_finished_requests_are_bounded_in_number() -> None:
    log = RequestLog(lambda: 0.0)
    for index in range(MAX_KEPT + 2):
        log._file(finished(str(index)))
    assert (log.find("0"), log.find("1"), log.find("2") is None) == (None, None, False)


def test_what_costs_nothing_is_no_request_that_is_charged() -> None:
    log = RequestLog(lambda: 0.0)
    ends = {"scored": (0, "length"), "refused": (0, "error"), "left": (0, "abort"), "cut": (3, "error")}
    for name, (num_tokens, finish) in ends.items():
        log._file(msgspec.structs.replace(finished(name), completion_tokens=num_tokens, finish=finish))
    assert (log.totals.requests, log.totals.free_requests, log.totals.completion_tokens) == (2, 2, 3)
