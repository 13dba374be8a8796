"""Cases of sections 3 and 4 that need names, processes and connections: a platform on the tiny base, with hooks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from case_world import Cases
from loraplex.client.upload import list_files
from loraplex_registry.wire.adapter import VersionView
from platforms import LivePlatform, command_of, list_children, running_platform, wait_for
from support import write_adapter

BASE = "tiny-cases"
NUM_SEQS = 4
PROMPT = "Forty teams share one copy of the base."
Long = Callable[[float, float], float]


class Desk:
    """A tenant on the platform, and the answers that its adapters gave at first."""

    def __init__(self, platform: LivePlatform, cases: Cases) -> None:
        self.platform, self.cases = platform, cases
        with platform.management() as client:
            client.create_tenant("team")
            scopes = ["infer", "adapters:read", "adapters:write", "usage:read"]
            self.key = client.create_key("team", "cases", scopes=scopes).key or ""
        self.client = platform.openai(self.key)
        for name in ("F01", "F02", "F07"):
            self.push(name.lower(), name)
        self.text_of = {name: self.ask(f"team/{name.lower()}") for name in ("F01", "F02", "F07")}
        self.text_of["base"] = self.ask(BASE)
        assert len(set(self.text_of.values())) == 4

    def push(self, adapter: str, source: str, **params: Any) -> VersionView:
        with self.platform.management(self.key) as client:
            return client.push("team", adapter, list_files(self.cases.folders[source]), lambda _: None, **params)

    def delete(self, adapter: str) -> None:
        with self.platform.management(self.key) as client:
            client.delete_adapter("team", adapter)

    def create(self, model: str, **fields: Any) -> Any:
        options: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        options["extra_body"] = {"ignore_eos": True}
        completions: Any = self.client.completions
        return completions.create(model=model, **options | fields)

    def create_raw(self, model: str, **fields: Any) -> Any:
        """As `create`, with the answer's headers."""
        options: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "extra_body": {"ignore_eos": True}}
        completions: Any = self.client.completions.with_raw_response
        return completions.create(model=model, **options | fields)

    def ask(self, model: str, **fields: Any) -> str:
        return str(self.create(model, **fields).choices[0].text)

    def count_copies(self, digest: str) -> int:
        """In how many of slots and host memory the engine holds a digest."""
        state = self.platform.engine_state()
        return sum(slot["digest"] == digest for slot in state["slots"]) + state["host"].count(digest)


@pytest.fixture(scope="module")
def platform(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    data_dir = tmp_path_factory.mktemp("cases-platform") / "data"
    flags = [
        "--base",
        str(cases.base),
        "--dtype",
        "float32",
        "--max-loras",
        "2",
        "--max-num-seqs",
        str(NUM_SEQS),
        "--cpu-threads",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAPLEX_TEST_HOOKS", "1")
        with running_platform(data_dir, *flags) as running:
            yield running


@pytest.fixture(scope="module")
def desk(platform: LivePlatform, cases: Cases) -> Iterator[Desk]:
    desk = Desk(platform, cases)
    with desk.client:
        yield desk


def test_hooks_are_open_where_the_setting_says_so(platform: LivePlatform, desk: Desk, tmp_path: Path) -> None:
    assert platform.ask_engine("/readyz").json()["test_hooks"] is True
    assert "LORAPLEX_TEST_HOOKS is set" in (platform.data_dir / "logs" / "engine.log").read_text()
    folder = write_adapter(tmp_path / "nan", desk.cases.base, std=float("nan"))
    digest = platform.ask_engine("/internal/test/bind", {"path": str(folder)}).json()["digest"]
    with pytest.raises(httpx.HTTPStatusError) as caught:
        platform.ask_engine("/v1/completions", {"model": digest, "prompt": PROMPT, "max_tokens": 4})
    assert caught.value.response.json()["error"]["code"] == "adapter_output_invalid"
    poisoned = platform.ask_engine("/internal/test/poison", {}).json()
    assert poisoned["kv_blocks"] == platform.engine_state()["kv"]["num_blocks"]
    assert desk.ask("team/f01") == desk.text_of["F01"]
    assert httpx.post(f"{platform.url}/internal/test/poison", json={}).status_code in (401, 404)


def test_b113_a_request_killed_in_the_middle_is_an_error_and_no_end(platform: LivePlatform, desk: Desk) -> None:
    # a tiny base may be done before the order to kill has arrived
    for _ in range(10):
        raw = desk.create_raw("team/f01", max_tokens=900, stream=True)
        body = {"id": raw.headers["x-request-id"], "after_tokens": 5}
        platform.ask_engine("/internal/test/kill_request", body)
        chunks: list[Any] = []
        try:
            chunks.extend(raw.parse())
        except openai.APIError:
            break
    else:
        pytest.fail("no request was killed")
    assert {choice.finish_reason for chunk in chunks for choice in chunk.choices} <= {None}
    desk.platform.wait_idle()


def test_b047_an_unknown_name_is_404_and_nothing_happened(desk: Desk) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        desk.ask("nope")
    error: Any = caught.value
    assert (error.type, error.code, error.param) == ("invalid_request_error", "model_not_found", "model")
    assert desk.ask(BASE) == desk.text_of["base"]


def test_b049_deleting_after_many_choices_returns_and_the_base_answers(desk: Desk) -> None:
    desk.push("many", "F01")
    for _ in range(3):
        assert len(desk.create("team/many", n=8, max_tokens=60, temperature=1).choices) == 8
    started_at = time.monotonic()
    desk.delete("many")
    assert desk.ask(BASE) == desk.text_of["base"]
    assert time.monotonic() - started_at < 60
    desk.platform.wait_idle()


def test_b050_deleting_under_streams_never_changes_who_answers(desk: Desk) -> None:
    desk.push("leaving", "F01")
    reached = threading.Barrier(9)

    def read(index: int) -> str | None:
        stream = desk.create("team/leaving", stream=True)
        # one piece, which may be all of them: tokens that wait for a busy client are sent together
        pieces = [next(stream).choices[0].text] if index < NUM_SEQS else []
        reached.wait(60)
        if index % 2:
            stream.close()
            return None
        return "".join(pieces) + "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(read, index) for index in range(8)]
        reached.wait(60)
        desk.delete("leaving")
        with pytest.raises(openai.NotFoundError):
            desk.ask("team/leaving")
        assert {text.result() for text in texts} == {None, desk.text_of["F01"]}
    desk.platform.wait_idle()


@pytest.mark.endure
def test_b052_no_request_begins_after_its_name_is_gone_and_nothing_is_left_of_it(desk: Desk, long: Long) -> None:
    digest = desk.push("brief", "F08").digest
    expected = desk.ask("team/brief")
    assert desk.count_copies(digest) == 2
    desk.delete("brief")
    for _ in range(int(long(3, 200))):
        desk.push("brief", "F08")
        is_gone = threading.Event()

        def call(is_gone: threading.Event = is_gone) -> list[tuple[bool, str | None]]:
            answers: list[tuple[bool, str | None]] = []
            while not (answers and answers[-1][0]):
                began_after = is_gone.is_set()
                try:
                    answers.append((began_after, desk.ask("team/brief", max_tokens=4)))
                except openai.NotFoundError:
                    answers.append((began_after, None))
            return answers

        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(call) for _ in range(2)]
            time.sleep(0.05)
            desk.delete("brief")
            is_gone.set()
            for answers in found:
                assert all(text is None or expected.startswith(text) for _, text in answers.result())
                assert [text for began_after, text in answers.result() if began_after] == [None]
    desk.platform.wait_idle()
    wait_for(lambda: desk.count_copies(digest) == 0)


def test_b065_requests_that_wait_keep_the_version_they_came_for(desk: Desk) -> None:
    first = desk.push("moving", "F01")

    def fill() -> Any:
        return desk.create(BASE, max_tokens=900, n=8, stream=True)

    def call() -> tuple[str, str]:
        raw = desk.create_raw("team/moving", max_tokens=24)
        return raw.headers["x-loraplex-digest"], raw.parse().choices[0].text

    with ThreadPoolExecutor(16) as pool:
        # eight choices of each, for four seats: what comes behind them waits until they are let go
        fillers = [pool.submit(fill) for _ in range(4)]
        wait_for(lambda: desk.platform.engine_state()["open_requests"] == 4)
        queued = [pool.submit(call) for _ in range(12)]
        wait_for(lambda: desk.platform.engine_state()["open_requests"] == 4 + 12)
        for source in ("F02", "F07"):
            desk.push("moving", source, promote="always")
        assert not any(found.done() for found in queued)
        for filler in fillers:
            filler.result().close()
        assert call()[1] == desk.text_of["F07"]
        assert {found.result() for found in queued} == {(first.digest, desk.text_of["F01"])}
    desk.platform.wait_idle()


@pytest.mark.parametrize("is_stream", [True, False], ids=["b079", "b080"])
@pytest.mark.parametrize("model", [BASE, "team/f01"])
def test_b079_b080_a_client_that_leaves_is_not_worked_for(desk: Desk, is_stream: bool, model: str) -> None:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 900, "stream": is_stream, "ignore_eos": True}
    # so many choices that the whole answer takes longer than its client has patience
    body["n"] = 1 if is_stream else 16
    headers = {"authorization": f"Bearer {desk.key}"}
    with httpx.Client(timeout=httpx.Timeout(30, read=30 if is_stream else 0.4)) as client:
        url = f"{desk.platform.url}/v1/completions"
        if is_stream:
            with client.stream("POST", url, json=body, headers=headers) as answer:
                lines = answer.iter_lines()
                [next(lines) for _ in range(5)]
        else:
            with pytest.raises(httpx.ReadTimeout):
                pytest.fail(client.post(url, json=body, headers=headers).text[:300])
    left_at = time.monotonic()
    desk.platform.wait_idle()
    assert time.monotonic() - left_at < 30
    before = desk.platform.engine_metrics()["loraplex_step_tokens_sum"]
    time.sleep(0.3)
    assert desk.platform.engine_metrics()["loraplex_step_tokens_sum"] == before


@pytest.mark.endure
def test_b081_as_many_aborts_as_clients_that_left(desk: Desk, long: Long) -> None:
    num_left = int(long(8, 20))

    def count() -> float:
        return desk.platform.engine_metrics()["loraplex_front_aborts_total"]

    def send(index: int) -> None:
        leaves = index % 11 == 10
        # so much for who leaves that no answer ends before a slow client has left
        fields = {"max_tokens": 900, "n": 16} if leaves else {"max_tokens": 2}
        stream = desk.create("team/f01" if index % 2 else BASE, stream=True, **fields)
        if leaves:
            next(stream)
            stream.close()
        else:
            assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"

    before = count()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(11 * num_left)))
    desk.platform.wait_idle()
    assert count() - before == num_left


def ask_patiently(ask: Callable[[], Any]) -> Any:
    """Ask until there is an answer, and check what was said before it."""
    for _ in range(600):
        try:
            return ask()
        except openai.InternalServerError as caught:
            error = caught
        assert error.code in ("no_replica", "replica_failed", "unavailable", "adapter_loading", "draining")
        assert error.status_code != 503 or error.response.headers.get("retry-after")
        time.sleep(0.2)
    raise AssertionError("no answer")


def test_b057_adapters_come_back_with_the_engine(desk: Desk) -> None:
    [engine] = [pid for pid in list_children(desk.platform.process.pid) if "loraplex_engine serve" in command_of(pid)]
    os.kill(engine, signal.SIGKILL)
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda name: ask_patiently(lambda: desk.ask(f"team/{name}")), ("f01", "f02"))
        assert list(texts) == [desk.text_of["F01"], desk.text_of["F02"]]


def test_b057_adapters_and_what_they_say_come_back_with_a_killed_core(desk: Desk) -> None:
    models = (BASE, "team/f01", "team/f07")
    seeded = {"temperature": 1, "seed": 3, "logprobs": 2, "max_tokens": 100}

    def ask(model: str) -> list[Any]:
        return [choice.model_dump() for choice in desk.create(model, n=2, **seeded).choices]

    expected = [ask(model) for model in models]
    streams = [desk.create(model, stream=True, **seeded | {"max_tokens": 900}) for model in models]
    pieces = [[next(stream)] for stream in streams]
    [core] = [pid for pid in list_children(desk.platform.process.pid) if "loraplex_engine core" in command_of(pid)]
    os.kill(core, signal.SIGKILL)
    for stream, found in zip(streams, pieces, strict=True):
        with pytest.raises(openai.APIError):
            found.extend(stream)
        assert {choice.finish_reason for chunk in found for choice in chunk.choices} == {None}
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda model: ask_patiently(lambda: ask(model)), models)) == expected
    desk.platform.wait_idle()


def test_b059_names_outlive_the_gateway(desk: Desk) -> None:
    [gateway] = [pid for pid in list_children(desk.platform.process.pid) if "loraplex gateway" in command_of(pid)]
    os.kill(gateway, signal.SIGKILL)
    answered = 0
    deadline = time.monotonic() + 60
    while answered < 20 and time.monotonic() < deadline:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            assert desk.ask("team/f07", max_tokens=24) == desk.text_of["F07"]
            answered += 1
            continue
        time.sleep(0.1)
    assert answered == 20
