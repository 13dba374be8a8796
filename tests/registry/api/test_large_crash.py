"""An upload in parts whose registry dies at any point: taken over, published once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex_registry.db.model import IdempotencyRow, UploadRow
from loraplex_registry.uploads import admission as admission_module
from loraplex_registry.uploads.admission import Admission
from loraplex_registry.uploads.sweep import Sweeper
from loraplex_registry.uploads.upload_row import UploadRows
from part_world import begin
from registry_world import World, read_folder

A = "/api/v1/tenants/team-a/adapters/style"


class DiedError(BaseException):
    """The process is gone: nothing that follows is run."""


async def write(world: World, statement: Any) -> None:
    await world.registry.services.database.write(lambda session: session.execute(statement))


async def age_rows(world: World) -> None:
    """Let a minute pass for what died."""
    then = datetime.now(UTC) - timedelta(seconds=61)
    await write(world, sa.update(UploadRow).values(touched_at=then))
    await write(world, sa.update(IdempotencyRow).where(IdempotencyRow.status.is_(None)).values(created_at=then))


def die_at(patch: pytest.MonkeyPatch, world: World, stage: str) -> None:
    """Let the next completion end at `stage`, without anything that a living process does afterwards."""

    async def die(*args: Any, **kwargs: Any) -> Any:
        raise DiedError

    def die_in_thread(*args: Any, **kwargs: Any) -> Any:
        raise DiedError

    async def forget(*args: Any) -> None:
        return None

    store = type(world.registry.services.store)
    real_admit = Admission.admit

    async def admit_and_die(self: Admission, *args: Any) -> Any:
        await real_admit(self, *args)
        raise DiedError

    patch.setattr(UploadRows, "reopen", forget)
    if stage == "after the transaction":
        patch.setattr(Admission, "admit", admit_and_die)
    elif stage == "in the transaction":
        patch.setattr(UploadRows, "finish", die)
    elif stage == "before the transaction":
        patch.setattr(admission_module, "publish", die)
    else:
        patch.setattr(store, stage, die_in_thread)


STAGES = ("list", "join", "put", "before the transaction", "in the transaction", "after the transaction", "drop")


@pytest.mark.parametrize("stage", STAGES)
async def test_completion_that_dies_is_finished_by_the_next(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    team, files = world.caller(), read_folder(make_adapter(1))
    view = await begin(team, A, files)
    path = f"{A}/uploads/{view['id']}"
    with monkeypatch.context() as patch:
        die_at(patch, world, stage)
        with pytest.raises(DiedError):
            await team("POST", f"{path}/complete")
    is_published = stage in ("after the transaction", "drop")
    versions = await team("GET", f"{A}/versions")
    assert (versions.status_code == 200) is is_published, "published whole or not at all"
    await age_rows(world)
    for _ in range(2):
        answer = await team("POST", f"{path}/complete")
        assert (answer.status_code, answer.json()["version"]) == (201, 1), answer.text
    assert [row["version"] for row in (await team("GET", f"{A}/versions")).json()["data"]] == [1]
    for name, content in files.items():
        assert (await team("GET", f"{A}/versions/1/files/{name}")).content == content
    services = world.registry.services
    await Sweeper(services.database, services.store, replace(services.settings, orphan_grace_s=-1)).sweep()
    assert list(services.store.list_uploads()) == []
    assert list((world.store / "receiving").iterdir()) == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_key_whose_registry_died_is_free_after_a_minute(world: World, make_adapter: Any) -> None:
    team, headers = world.caller(), {"Idempotency-Key": "push-1"}
    claimed = IdempotencyRow(key_id="key_tenant_team-a", route="POST team-a/style/versions", idempotency_key="push-1")

    async def work(session: Any) -> None:
        session.add(claimed)

    await world.registry.services.database.write(work)
    running = await team.upload(A, make_adapter(1), headers=headers)
    assert (running.status_code, running.json()["error"]["code"]) == (409, "conflict")
    await age_rows(world)
    assert (await team.upload(A, make_adapter(1), headers=headers)).status_code == 201


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_work_that_goes_on_says_so(world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_registry.uploads import heartbeat

    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.02)
    team = world.caller()
    view = await begin(team, A, read_folder(make_adapter(1)))
    path = f"{A}/uploads/{view['id']}/complete"
    real_admit, codes = Admission.admit, []

    async def admit_late(self: Admission, *args: Any) -> Any:
        await age_rows(world)
        await asyncio.sleep(0.3)
        codes.extend([(await team("POST", path, headers=key)).status_code for key in ({}, {"Idempotency-Key": "k"})])
        return await real_admit(self, *args)

    monkeypatch.setattr(Admission, "admit", admit_late)
    answer = await team("POST", path, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, codes) == (201, [409, 409])
