"""Clients that do not read: their requests end, memory stays bounded, and nobody else waits for them."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.server import answer
from loraplex_registry.http import protocol
from scripted_core import BASE, Rig, running_rig, sign, until
from toy_tokenizers import write_byte_level

PATH = "/v1/completions"
LIMIT = 64 << 10
BODY: dict[str, Any] = {"model": BASE, "prompt": "hi", "max_tokens": 5_000_000, "stream": True}


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(answer, "MAX_PENDING_BYTES", LIMIT)
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), max_model_len=10_000_000) as running:
        running.core.answer = running.core.encode("x y ") * 400_000
        yield running


@contextmanager
def deaf_client(rig: Rig, body: dict[str, Any]) -> Iterator[None]:
    """A client that sends a request and reads nothing."""
    content = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "host: e", f"authorization: Bearer {sign()}"]
    lines += ["content-type: application/json", f"content-length: {len(content)}", "", ""]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(rig.uds)
        client.sendall("\r\n".join(lines).encode() + content)
        yield


def pending_bytes(rig: Rig) -> int:
    return sum(choice.pending_bytes for generation in rig.front.log.all_open() for choice in generation._choices)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 5}, {"n": 4}], ids=["text", "logprobs", "choices"])
async def test_a_client_that_never_reads_ends_within_its_bounds(
    rig: Rig, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.5)
    num_choices = fields.get("n", 1)
    most = 0
    with deaf_client(rig, BODY | fields):
        await until(lambda: len(rig.core.added) == num_choices)

        def is_aborted() -> bool:
            nonlocal most
            most = max(most, pending_bytes(rig))
            return len(rig.core.aborted) == num_choices

        await until(is_aborted)
        assert {reason for _, reason in rig.core.aborted} == {"abort"}
        assert most < 2 * LIMIT
        await until(lambda: rig.front.log.num_open == 0)
        assert rig.core.num_running == 0


async def test_others_get_their_answers_beside_a_client_that_never_reads(rig: Rig) -> None:
    with deaf_client(rig, BODY):
        await until(lambda: rig.core.added)
        for is_stream in (True, False):
            response = await rig.post(PATH, BODY | {"stream": is_stream, "max_tokens": 100})
            assert response.status_code == 200
            assert '"finish_reason":"length"' in response.text
        await until(lambda: rig.core.aborted)
    await until(lambda: rig.front.log.num_open == 0)


async def test_a_short_answer_that_nobody_reads_holds_nothing_in_the_core(rig: Rig) -> None:
    with deaf_client(rig, BODY | {"max_tokens": 500}):
        await until(lambda: rig.core.added and not rig.core.num_running)
        await until(lambda: rig.front.log.num_open == 0)
    assert rig.core.aborted == []
