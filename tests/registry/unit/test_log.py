"""Lines of the log: one an event whatever clients say, with the facts of the request that they belong to."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from loraplex_registry.wire.log import AccessLog, JsonFormatter, TextFormatter, note

EVIL = 'a\r\n2026-01-01T00:00:00.000Z INFO x forged\x1b[2J\x85\u2028\u202e"}\n{"level":"info","message":"forged"}'


log = logging.getLogger("test_log")


class Kept(logging.Handler):
    """Keeps what a formatter makes of each record."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def keep(formatter: logging.Formatter) -> Iterator[Kept]:
    handler = Kept(formatter)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    yield handler
    log.removeHandler(handler)


@pytest.fixture(params=[JsonFormatter, TextFormatter])
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    with keep(request.param()) as handler:
        yield handler


@pytest.fixture
def as_json() -> Iterator[Kept]:
    with keep(JsonFormatter()) as handler:
        yield handler


def test_what_clients_say_makes_no_line_of_its_own(kept: Kept) -> None:
    log.info("unknown model %s", EVIL, extra={"facts": {"model": EVIL}})
    (line,) = kept.lines
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_a_trace_makes_no_line_that_could_be_another_event(kept: Kept) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("it failed")
    first, *others = kept.lines[0].split("\n")
    assert "it failed" in first
    assert all(line.startswith("    | ") for line in others)
    assert all(line.isprintable() for line in (first, *others))
    assert "ValueError" in kept.lines[0]


def test_json_says_what_text_said(as_json: Kept) -> None:
    log.warning("unknown model %s", EVIL, extra={"facts": {"model": EVIL, "version": 3}})
    shown = json.loads(as_json.lines[0])
    assert (shown["level"], shown["logger"], shown["message"]) == ("warning", "test_log", f"unknown model {EVIL}")
    assert (shown["model"], shown["version"]) == (EVIL, 3)
    assert shown["time"].endswith("Z")


def test_half_a_character_is_no_end_of_the_log(kept: Kept) -> None:
    # given to the handler alone: what pytest keeps of a log has to be whole text
    record = log.makeRecord(
        log.name, logging.INFO, __file__, 1, "half %s", ("\ud83d",), None, extra={"facts": {"model": "\ud83d"}}
    )
    kept.handle(record)
    assert "\\ud83d" in kept.lines[0]


def test_facts_of_other_kinds_are_written_as_text(kept: Kept) -> None:
    log.info("odd", extra={"facts": {"kind": object}})
    assert "object" in kept.lines[0]


async def serve(path: str = "/v1/models", **facts: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        note(**facts)
        log.debug("inside")
        await asyncio.create_task(send_later(send))

    async def send_later(send: Any) -> None:
        note(late=True)
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        pass

    await AccessLog(app, "test_log")({"type": "http", "method": "GET", "path_template": path}, None, send)  # type: ignore[arg-type]


async def test_each_line_of_a_request_has_its_facts_and_the_last_tells_how_it_went(as_json: Kept) -> None:
    await asyncio.gather(serve(request_id="req_1", tenant="x", none=None), serve(request_id="req_2", route="/other"))
    log.info("outside")
    shown = [json.loads(line) for line in as_json.lines]
    inside = {line["request_id"]: line for line in shown if line["message"] == "inside"}
    ends = {line["request_id"]: line for line in shown if "status" in line}
    assert set(inside) == set(ends) == {"req_1", "req_2"}
    assert inside["req_1"]["tenant"] == "x"
    assert "tenant" not in ends["req_2"]
    assert "none" not in ends["req_1"]
    assert ends["req_1"] | {"time": "", "answered_s": 0, "took_s": 0} == {
        "time": "",
        "level": "info",
        "logger": "test_log",
        "message": "GET /v1/models 200",
        "request_id": "req_1",
        "tenant": "x",
        "late": True,
        "method": "GET",
        "route": "/v1/models",
        "status": 200,
        "answered_s": 0,
        "took_s": 0,
    }
    assert ends["req_2"]["route"] == "/other"
    assert 0 <= ends["req_1"]["answered_s"] <= ends["req_1"]["took_s"] < 5
    assert "request_id" not in shown[-1]


async def test_probes_are_told_of_only_at_debug(as_json: Kept) -> None:
    await serve("/healthz")
    assert [json.loads(line)["level"] for line in as_json.lines] == ["debug", "debug"]
