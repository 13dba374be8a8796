"""The routes for tests, against a scripted core: they are absent unless asked for, and need the gateway's token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.errors import ConfigError
from loraplex_engine.server import process
from loraplex_engine.wire import messages as wire
from scripted_core import BASE, Rig, running_rig, until
from toy_tokenizers import write_byte_level

ROUTES = ["bind", "poison", "kill_request", "spoil"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), has_test_hooks=True) as running:
        yield running


async def test_hooks_pass_on_what_they_are_told(rig: Rig) -> None:
    rig.core.replies |= {"test_bind": {"digest": "sha256:x"}, "test_poison": {"kv_blocks": 3, "slots": 1}}
    bound = await rig.http.post("/internal/test/bind", json={"path": "/a/b"})
    poisoned = await rig.http.post("/internal/test/poison", json={})
    killed = await rig.http.post("/internal/test/kill_request", json={"id": "req_a", "after_tokens": 5})
    spoiled = await rig.http.post("/internal/test/spoil", json={"digest": "sha256:x"})
    assert [answer.status_code for answer in (bound, poisoned, killed, spoiled)] == [200, 200, 200, 200]
    assert (bound.json(), poisoned.json()) == ({"digest": "sha256:x"}, {"kv_blocks": 3, "slots": 1})
    expected = [wire.BindFolder(1, "/a/b"), wire.PoisonFree(2), wire.KillRequest(3, "req_a", 5)]
    assert rig.core.calls == [*expected, wire.SpoilSlot(4, "sha256:x")]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("bind", {}),
        ("bind", {"path": 1}),
        ("bind", {"path": "/a", "x": 1}),
        ("poison", {"x": 1}),
        ("kill_request", {"id": "a"}),
        ("kill_request", {"id": "a", "after_tokens": "5"}),
    ],
)
async def test_a_malformed_hook_is_refused(rig: Rig, route: str, body: dict[str, Any]) -> None:
    assert (await rig.http.post(f"/internal/test/{route}", json=body)).status_code == 400
    assert rig.core.calls == []


@pytest.mark.parametrize("route", ROUTES)
async def test_hooks_need_the_gateway_s_token(rig: Rig, route: str) -> None:
    answer = await rig.http.post(f"/internal/test/{route}", json={}, headers={"authorization": "Bearer x"})
    assert answer.status_code == 401


async def test_readiness_tells_that_the_hooks_are_open(rig: Rig) -> None:
    assert (await rig.http.get("/readyz")).json() == {"status": "serving", "model": BASE, "test_hooks": True}


async def test_without_the_setting_there_are_no_hooks(tmp_path: Path) -> None:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as rig:
        for route in ROUTES:
            answer = await rig.http.post(f"/internal/test/{route}", json={"path": "/a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert (await rig.http.get("/readyz")).json() == {"status": "serving", "model": BASE}
        await until(lambda: rig.core.calls == [])


@pytest.mark.enable_socket
@pytest.mark.parametrize(("address", "is_refused"), [("0.0.0.0:0", True), ("[::1]:0", False), ("localhost:0", False)])
def test_hooks_are_refused_where_others_could_reach_them(address: str, is_refused: bool) -> None:
    listener = process._listen(address)
    with listener, pytest.raises(ConfigError, match="LORAPLEX_TEST_HOOKS") if is_refused else nullcontext():
        process._check_hooks(listener)
