"""What is left when something dies in the middle: objects without rows, rows never without objects."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import Any

import pytest

from loraplex_registry.db.database import Change
from loraplex_registry.errors import UnavailableError
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads import admission as admission_module
from loraplex_registry.uploads import upload as upload_module
from loraplex_registry.uploads.sweep import Sweeper
from registry_world import World

A = "/api/v1/tenants/team-a/adapters/style"


def _sweeper(world: World, grace_s: float) -> Sweeper:
    services = world.registry.services
    settings: RegistrySettings = replace(services.settings, orphan_grace_s=grace_s)
    return Sweeper(services.database, services.store, settings)


async def _orphan(world: World, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload whose transaction fails after its object was stored."""

    async def fail(*args: Any) -> None:
        raise UnavailableError

    with monkeypatch.context() as patch:
        patch.setattr(admission_module, "publish", fail)
        answer = await world.caller().upload(A, folder)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_object_without_row_is_swept_once_it_is_old(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.caller().upload(A, make_adapter(1))
    kept = world.objects()
    await _orphan(world, make_adapter(2), monkeypatch)
    assert world.objects() != kept
    assert await _sweeper(world, 3600).sweep() == []
    assert len(await _sweeper(world, -1).sweep()) == 1
    assert world.objects() == kept
    assert await _sweeper(world, -1).sweep() == []


async def test_upload_after_a_crash_takes_the_orphan_over(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter(1)
    await _orphan(world, folder, monkeypatch)
    assert (await world.caller().upload(A, folder)).status_code == 201
    assert await _sweeper(world, -1).sweep() == []


async def test_sweeper_between_object_and_row_costs_nothing(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, team, num_sweeps = world.registry.services.store, world.caller(), 0
    put = type(store).put

    def put_then_sweep(self: Any, *args: Any) -> Any:
        nonlocal num_sweeps
        places = put(self, *args)
        if num_sweeps == 0:
            num_sweeps += 1
            sweeping = asyncio.run_coroutine_threadsafe(_sweeper(world, -1).sweep(), loop)
            assert len(sweeping.result(10)) == 1
        return places

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(store), "put", put_then_sweep)
    monkeypatch.setattr(type(store), "sweep_staging", lambda self, min_age_s: 0)
    folder = make_adapter(1)
    assert (await team.upload(A, folder)).status_code == 201
    content = (await team("GET", f"{A}/versions/1/files/adapter_model.safetensors")).content
    assert content == (folder / "adapter_model.safetensors").read_bytes()
    assert num_sweeps == 1


async def test_bytes_of_an_orphan_go_while_names_can_change(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change_nothing(change: Change) -> int:
        return change.epoch

    def rmtree_meanwhile(*args: Any, **kwargs: Any) -> None:
        changing = asyncio.run_coroutine_threadsafe(world.registry.services.database.change(change_nothing), loop)
        epochs.append(changing.result(5))
        rmtree(*args, **kwargs)

    loop, rmtree, epochs = asyncio.get_running_loop(), shutil.rmtree, list[int]()
    await _orphan(world, make_adapter(1), monkeypatch)
    monkeypatch.setattr(shutil, "rmtree", rmtree_meanwhile)
    assert len(await _sweeper(world, -1).sweep()) == 1
    assert world.objects() == []
    assert len(epochs) == 1


async def test_transaction_that_has_begun_ends_though_its_client_is_gone(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    real = admission_module.publish

    async def held(*args: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await real(*args)

    monkeypatch.setattr(admission_module, "publish", held)
    before = world.registry.epoch.current
    uploading = asyncio.create_task(world.caller().upload(A, make_adapter(1)))
    await begun.wait()
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    go_on.set()
    async with asyncio.timeout(60):
        while world.registry.epoch.current == before:  # noqa: ASYNC110 - the epoch is a number, not an event
            await asyncio.sleep(0.01)
    assert (await world.caller()("GET", f"{A}/versions/1")).json()["promoted"] is True


async def test_staging_is_empty_after_good_bad_and_broken_uploads(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    await team.upload(A, {"adapter_config.json": b"{}"})
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="README.md"\r\n\r\nhalf'
    await team("POST", f"{A}/versions", content=part, headers=headers)
    for folder in ("receiving", "tmp"):
        assert [*await asyncio.to_thread((world.store / folder).iterdir)] == []


async def test_alias_moved_during_an_upload_wins_over_its_promotion(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    await team.upload(A, make_adapter(2))
    real = upload_module.receive

    async def receive_after_a_move(*args: Any, **kwargs: Any) -> Any:
        body = {"targets": [{"version": 2, "weight": 100}]}
        assert (await team("PUT", f"{A}/aliases/live", json=body, headers={"If-Match": '"1"'})).status_code == 200
        return await real(*args, **kwargs)

    monkeypatch.setattr(upload_module, "receive", receive_after_a_move)
    late = await team.upload(A, make_adapter(3), params={"promote": "always"})
    assert (late.status_code, late.json()["promoted"]) == (201, False)
    assert (await team("GET", A)).json()["live"] == 2


async def test_upload_of_a_tenant_that_was_deleted_meanwhile_publishes_nothing(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: set[str] = set()
    world.registry.know_tenants(lambda name: False, lambda tenant_id: tenant_id not in dead)
    real = upload_module.receive

    async def receive_after_a_deletion(*args: Any, **kwargs: Any) -> Any:
        found = await real(*args, **kwargs)
        dead.add("id-team-a")
        return found

    monkeypatch.setattr(upload_module, "receive", receive_after_a_deletion)
    late = await world.caller().upload(A, make_adapter(1))
    assert (late.status_code, late.json()["error"]["code"]) == (404, "not_found")
    assert (await world.registry.names_delta(0)).adapters == ()
    assert (await world.caller("team-b").upload(A.replace("team-a", "team-b"), make_adapter(1))).status_code == 201


async def test_database_that_does_not_answer_is_503(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncSession

    async def fail(*args: Any, **kwargs: Any) -> None:
        raise sa.exc.OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(AsyncSession, "execute", fail)
    answer = await world.caller()("GET", A)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
