"""The route that measures parity and the gateway's client of it, against a scripted core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from loraplex_engine.parity.golden import GOLDEN_TEXTS
from loraplex_engine.wire import messages as wire
from loraplex_engine.wire.client import EngineClient, EngineRefusedError, ReplicaFailedError, UnreachableError
from loraplex_registry.peft.parity import ParityResult
from scripted_core import DIGEST, Rig, running_rig, sign, until
from toy_tokenizers import write_byte_level

RESULT = ParityResult(
    dtype="bfloat16",
    num_prompts=4,
    num_positions=156,
    max_logit_difference=1.25,
    max_kl=0.02,
    base_logit_difference=1.5,
    base_kl=0.01,
    logit_limit=8.0,
    kl_limit=0.3,
    rms_difference=0.2,
    rms_limit=0.5,
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


def sign_as_platform() -> str:
    return sign(role="admin", tenant_id=None, tenant=None, scopes=())


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[EngineClient]:
    engine = EngineClient("http://engine", sign_as_platform, uds=rig.uds)
    yield engine
    await engine.close()


async def test_the_client_gets_what_the_core_measured(rig: Rig, client: EngineClient) -> None:
    rig.core.replies["parity"] = msgspec.structs.asdict(RESULT)
    weights_digest = rig.core.facts.weights_digest
    assert await client.measure_parity(DIGEST) == msgspec.structs.replace(RESULT, weights_digest=weights_digest)
    (call,) = rig.core.calls
    assert isinstance(call, wire.MeasureParity)
    assert (call.digest, len(call.texts)) == (DIGEST, len(GOLDEN_TEXTS))
    assert all(0 < len(ids) <= 40 for ids in call.texts)


@pytest.mark.parametrize(
    ("code", "retry_after_s", "status"),
    [
        ("digest_mismatch", 5, 503),
        ("adapter_quarantined", None, 409),
        ("adapter_loading", 2, 503),
        ("queue_full", 1, 429),
    ],
)
async def test_a_refusal_comes_with_its_code(
    rig: Rig, client: EngineClient, code: str, retry_after_s: int | None, status: int
) -> None:
    rig.core.replies["parity"] = wire.ErrorInfo(code, "It is so.", retry_after_s)
    with pytest.raises(EngineRefusedError, match="It is so") as caught:
        await client.measure_parity(DIGEST)
    assert (caught.value.code, caught.value.retry_after_s) == (code, retry_after_s)
    answer = await rig.http.post(f"/internal/parity/{DIGEST}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_digest_that_is_none_is_refused_before_the_core(rig: Rig, client: EngineClient) -> None:
    with pytest.raises(EngineRefusedError) as caught:
        await client.measure_parity("sha256:x")
    assert caught.value.code == "invalid_request_error"
    assert rig.core.calls == []


async def test_the_route_needs_the_gateway_s_token(rig: Rig) -> None:
    answer = await rig.http.post(f"/internal/parity/{DIGEST}", headers={"authorization": "Bearer x"})
    assert answer.status_code == 401


async def test_a_tenant_s_token_measures_nothing(rig: Rig) -> None:
    answer = await rig.http.post(f"/internal/parity/{DIGEST}", headers={"authorization": f"Bearer {sign()}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert rig.core.calls == []


async def test_a_caller_that_gives_up_ends_the_measurement(rig: Rig, client: EngineClient) -> None:
    rig.core.mute.add("parity")
    with pytest.raises(ReplicaFailedError):
        await client.measure_parity(DIGEST, timeout_s=0.2)
    await until(lambda: len(rig.core.calls) == 2)
    asked, cancelled = rig.core.calls
    assert cancelled == wire.CancelParity(asked.call_id)


async def test_an_engine_that_is_away_or_answers_nonsense_is_told(client: EngineClient, tmp_path: Path) -> None:
    away = EngineClient("http://engine", sign_as_platform, uds=str(tmp_path / "none"))
    with pytest.raises(UnreachableError):
        await away.measure_parity(DIGEST)
    await away.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad\r\ncontent-length: 3\r\nconnection: close\r\n\r\n???")
        await writer.drain()
        writer.close()

    path = str(tmp_path / "odd")
    async with await asyncio.start_unix_server(answer, path):
        odd = EngineClient("http://engine", sign_as_platform, uds=path)
        with pytest.raises(ReplicaFailedError, match="502"):
            await odd.measure_parity(DIGEST)
        await odd.close()
