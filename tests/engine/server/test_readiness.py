"""What an orchestrator asks, which has no identity: whether the engine lives, and whether it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scripted_core import BASE, Rig, running_rig, sign
from toy_tokenizers import write_byte_level

STRANGERS = ["", "Bearer x", f"Bearer {sign(audience='registry')}"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), has_test_hooks=True) as running:
        yield running


@pytest.mark.parametrize("authorization", STRANGERS)
async def test_a_stranger_hears_that_it_serves_and_nothing_else(rig: Rig, authorization: str) -> None:
    answer = await rig.http.get("/readyz", headers={"authorization": authorization})
    assert (answer.status_code, answer.json()) == (200, {"status": "serving"})


async def test_the_gateway_hears_what_it_serves(rig: Rig) -> None:
    answer = await rig.http.get("/readyz", headers={"authorization": f"Bearer {sign()}"})
    assert answer.json() == {"status": "serving", "model": BASE, "test_hooks": True}


@pytest.mark.parametrize("authorization", STRANGERS)
async def test_a_stranger_hears_that_it_does_not_serve(rig: Rig, authorization: str) -> None:
    headers = {"authorization": authorization}
    await rig.kill_core()
    assert (await rig.http.get("/readyz", headers=headers)).status_code == 503
    assert (await rig.http.get("/healthz", headers=headers)).status_code == 200


async def test_a_stranger_hears_that_it_drains(rig: Rig) -> None:
    await rig.http.post("/internal/drain")
    answer = await rig.http.get("/readyz", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
