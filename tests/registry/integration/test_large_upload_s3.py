"""Uploads in parts on a real S3 server: parts go there with signed requests, and never through the registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.sweep import Sweeper
from part_world import PART_BYTES, announce, begin, missing, send
from registry_world import ENGINE_KEY, World, read_folder

A = "/api/v1/tenants/team-a/adapters/style"


@pytest.fixture
def registry_settings(database_url: str, s3_url: str) -> RegistrySettings:
    return RegistrySettings(database_url=database_url, object_store_url=s3_url, engine_key=ENGINE_KEY)


@pytest.fixture
def files(make_adapter: Any) -> dict[str, bytes]:
    return {**read_folder(make_adapter(1)), "tokenizer.json": b'{"x": "' + b"y" * PART_BYTES + b'"}'}


async def test_parts_go_to_the_store_and_become_a_version(
    world: World, files: dict[str, bytes], tmp_path: Path
) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    assert all("/api/v1/" not in part["url"] for part in view["parts"])
    first, content = next(missing(view, files))
    other = bytes([content[0] ^ 1]) + content[1:]
    for wrong in (other, content[:-1], content + b"x"):
        with_wrong = await send(team, first, wrong)
        assert with_wrong.status_code in (400, 403), with_wrong.text
    assert (await team("GET", f"{A}/uploads/{view['id']}")).json()["received_bytes"] == 0
    for part, content in missing(view, files):
        assert (await send(team, part, content)).status_code == 200
    assert (await team("GET", f"{A}/uploads/{view['id']}")).json()["received_bytes"] == view["size_bytes"]
    answers = [await team("POST", f"{A}/uploads/{view['id']}/complete") for _ in range(2)]
    assert [(answer.status_code, answer.json()["version"]) for answer in answers] == [(201, 1)] * 2
    for name, content in files.items():
        assert (await team("GET", f"{A}/versions/1/files/{name}")).content == content
    assert list(world.registry.services.store.list_uploads()) == []
    again = await team.upload(A, files)
    assert (again.status_code, again.json()["digest"]) == (200, answers[0].json()["digest"])


async def test_part_that_came_late_is_swept(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    assert (await team("DELETE", f"{A}/uploads/{view['id']}")).status_code == 204
    part, content = next(missing(view, files))
    assert (await send(team, part, content)).status_code == 200, "the store knows no uploads"
    services = world.registry.services
    assert [upload for upload, _ in services.store.list_uploads()] == [view["id"]]
    settings = replace(services.settings, orphan_grace_s=3600)
    await Sweeper(services.database, services.store, settings).sweep()
    assert list(services.store.list_uploads()) == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_signed_request_is_good_for_its_part_alone(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    parts = list(missing(view, files))
    elsewhere = {**parts[0][0], "url": parts[0][0]["url"].replace(view["id"], "upl_" + "a" * 26)}
    assert (await send(team, elsewhere, parts[0][1])).status_code == 403
    swapped = {**parts[0][0], "headers": parts[1][0]["headers"]}
    assert (await send(team, swapped, parts[1][1])).status_code in (400, 403)
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(parts[0][0]["url"])).status_code == 403


async def test_store_that_goes_away_leaves_the_upload_open(
    world: World, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex_registry.errors import StoreUnavailableError

    team = world.caller()
    view = await begin(team, A, files)
    store = world.registry.services.store

    def fail(*args: Any) -> Any:
        raise StoreUnavailableError

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put", fail)
        answer = await team("POST", f"{A}/uploads/{view['id']}/complete")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert (await team("POST", f"{A}/uploads/{view['id']}/complete")).status_code == 201
