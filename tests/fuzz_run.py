"""Sends odd requests side by side and judges what comes back; every fault is kept with what provoked it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from byte_client import ByteAnswer, ByteClient, connected
from odd_requests import Odd

NUM_WORKERS = 6
# what may hang waits so long for an answer, and everything else fails that takes so long
PATIENCE_S, LIMIT_S = 2.0, 30.0
# refusals that have no field to name: the body, or what comes before it
_NAMELESS = {"invalid_json", "payload_too_large"}
_FIELD_KINDS = {"field", "fields", "absent", "unknown", "messages", "constraint", "tools", "leaving", "good", "large"}
_SHAPE = {"message", "type", "param", "code"}


@dataclass
class FuzzReport:
    """What came of a run."""

    num_sent: int = 0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def describe(self) -> str:
        """For people."""
        by_status = Counter[int]()
        for (_, status), count in self.statuses.items():
            by_status[status] += count
        times = sorted(self.seconds)
        half, most = times[len(times) // 2], times[int(len(times) * 0.99)]
        return (
            f"{self.num_sent} sent, {len(self.faults)} faults; statuses {dict(sorted(by_status.items()))}; "
            f"codes {dict(self.codes.most_common())}; p50 {half * 1e3:.0f} ms, p99 {most * 1e3:.0f} ms, "
            f"slowest {self.slowest[0]:.1f} s {self.slowest[1][:200]}"
        )


async def run_fuzz(address: str | tuple[str, int], odds: Iterator[Odd], count: int) -> FuzzReport:
    """Send `count` of the requests."""
    report = FuzzReport()
    shared = itertools.islice(odds, count)

    async def work() -> None:
        for odd in shared:
            await _try(address, odd, report)

    await asyncio.gather(*(work() for _ in range(NUM_WORKERS)))
    return report


async def _try(address: str | tuple[str, int], odd: Odd, report: FuzzReport) -> None:
    started = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await _ask(address, odd)
        judge(odd, answer)
        report.statuses[odd.kind, answer.status if answer else 0] += 1
        if answer and answer.status >= 400 and answer.body:
            report.codes[answer.json()["error"]["code"]] += 1
    except (AssertionError, TimeoutError, ValueError, OSError, asyncio.IncompleteReadError) as fault:
        report.faults.append(f"{odd.kind}: {type(fault).__name__} {str(fault)[:600]}\n  {odd.note}")
    took = time.perf_counter() - started
    report.seconds.append(took)
    report.slowest = max(report.slowest, (took, f"{odd.kind} {odd.note}"))
    report.num_sent += 1


async def _ask(address: str | tuple[str, int], odd: Odd) -> ByteAnswer | None:
    async with connected(address) as client:
        with contextlib.suppress(ConnectionError):
            await client.send(odd.data, odd.piece)
        if odd.leave is None:
            return await client.read_answer()
        if odd.leave_after < 0 and odd.kind != "cut":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    return await _read_odd(client)
        elif odd.leave_after > 0:
            await client.reader.read(odd.leave_after)
        with contextlib.suppress(OSError, RuntimeError):
            client.leave(odd.leave)
            if odd.leave == "half":
                # gone is gone, also for the server
                await client.reader.read()
        return None


async def _read_odd(client: ByteClient) -> ByteAnswer | None:
    """An answer to what may be no request, or one without a body."""
    try:
        return await client.read_answer()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def judge(odd: Odd, answer: ByteAnswer | None) -> None:
    """Fail unless the answer is one that such a request may get."""
    if answer is None or (answer.status == 0 and odd.kind not in _FIELD_KINDS | {"json"}):
        return
    if odd.kind == "bytes" and answer.status == 503 and b'"adapter_loading"' in answer.body:
        # the bytes made another digest, which an engine asks its registry for
        return
    assert 200 <= answer.status < 500, (answer.status, answer.body[:500])
    if answer.status >= 400:
        _judge_refusal(odd, answer)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert b'data: {"error"' not in answer.body, answer.body[-500:]
        assert answer.body.endswith(b"data: [DONE]\n\n"), answer.body[-200:]
    elif answer.headers.get("content-type", "").startswith("application/json"):
        json.loads(answer.body, parse_constant=_refuse_constant)


def _judge_refusal(odd: Odd, answer: ByteAnswer) -> None:
    if odd.note.startswith("HEAD"):
        return
    assert answer.body.isascii()
    assert len(answer.body) < 2000, answer.body[:500]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == _SHAPE, error
    assert error["message"]
    assert error["code"] != "internal_error", error
    if odd.kind in _FIELD_KINDS and error["code"] not in _NAMELESS:
        assert isinstance(error["param"], str), error
        assert odd.params is None or error["param"] in odd.params, error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
