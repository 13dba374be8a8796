"""What other parts read: artifacts with the engine key, names by epoch."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from loraplex_registry.app import create_registry
from loraplex_registry.wire.adapter import Manifest, NamesDelta
from registry_world import ENGINE_KEY, World, read_folder

A = "/api/v1/tenants/team-a/adapters/style"
ENGINE = {"Authorization": f"Bearer {ENGINE_KEY}"}


async def test_engine_reads_artifacts_and_nothing_else(world: World, make_adapter: Any) -> None:
    folder = make_adapter(1)
    digest = (await world.caller().upload(A, folder)).json()["digest"]
    path = f"/internal/artifacts/{digest}"
    answer = await world.http.get(f"{path}/manifest", headers=ENGINE)
    manifest = msgspec.json.decode(answer.content, type=Manifest)
    assert (manifest.digest, manifest.base_fingerprint) == (digest, "f" * 64)
    assert [file.name for file in manifest.files] == ["adapter_config.json", "adapter_model.safetensors"]
    for name, content in read_folder(folder).items():
        assert (await world.http.get(f"{path}/files/{name}", headers=ENGINE)).content == content
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        world.caller("team-a").headers,
        world.caller(role="admin").headers,
    ):
        assert (await world.http.get(f"{path}/manifest", headers=headers)).status_code == 401
    assert (await world.http.get(A, headers=ENGINE)).status_code == 401
    assert (await world.http.get("/internal/names", headers=ENGINE)).status_code == 401


async def test_missing_artifacts_are_404_and_no_path_escapes(world: World, make_adapter: Any) -> None:
    digest = (await world.caller().upload(A, make_adapter(1))).json()["digest"]
    for path in (
        f"sha256:{'0' * 64}/manifest",
        "sha256:..%2f..%2fx/manifest",
        "sha256:zz/manifest",
        f"{digest}/files/manifest.json",
        f"{digest}/files/..%2fmanifest.json",
    ):
        answer = await world.http.get(f"/internal/artifacts/{path}", headers=ENGINE)
        assert answer.status_code in (400, 404), path


async def _delta(world: World, since: int) -> NamesDelta:
    answer = await world.caller(None, role="admin")("GET", "/internal/names", params={"since": since})
    assert answer.status_code == 200
    delta = msgspec.json.decode(answer.content, type=NamesDelta)
    assert delta == await world.registry.names_delta(since)
    return delta


async def test_names_delta_holds_what_changed_and_the_epoch_is_published_first(world: World, make_adapter: Any) -> None:
    team, epoch = world.caller(), world.registry.epoch
    start = epoch.current
    digest = (await team.upload(A, make_adapter(1))).json()["digest"]
    assert epoch.current > start
    delta = await _delta(world, start)
    (adapter,) = delta.adapters
    assert (delta.epoch, delta.bases) == (epoch.current, ())
    assert (adapter.tenant_id, adapter.tenant, adapter.name, adapter.base) == (
        "id-team-a",
        "team-a",
        "style",
        "tiny-llama",
    )
    assert (adapter.is_default, adapter.deleted) == (True, False)
    assert [(v.number, v.digest, v.state, v.kind) for v in adapter.versions] == [(1, digest, "ready", "lora")]
    assert [(t.version, t.weight) for t in adapter.aliases["live"]] == [(1, 100)]
    assert set(adapter.alias_ids) == {"live"}

    before = epoch.current
    assert (await _delta(world, before)).adapters == ()
    await team.upload(A.replace("style", "other"), make_adapter(2))
    assert [a.name for a in (await _delta(world, before)).adapters] == ["other"]

    before = epoch.current
    await team("DELETE", A)
    (gone,) = (await _delta(world, before)).adapters
    assert (gone.adapter_id, gone.deleted, gone.versions, gone.aliases) == (adapter.adapter_id, True, (), {})
    whole = await _delta(world, 0)
    assert ([a.name for a in whole.adapters], [base.name for base in whole.bases]) == (["other"], ["tiny-llama"])
    assert await _delta(world, 10**9) == whole


async def test_refusals_change_no_names(world: World) -> None:
    before = await _delta(world, 0)
    await world.caller().upload(A, {"adapter_config.json": b"{}"})
    assert await _delta(world, 0) == before


async def test_deleting_all_adapters_of_a_tenant(world: World, make_adapter: Any) -> None:
    ours, theirs = world.caller("team-a"), world.caller("team-b")
    await ours.upload(A, make_adapter(1))
    await ours.upload(A.replace("style", "other"), make_adapter(2))
    await theirs.upload(A.replace("team-a", "team-b"), make_adapter(3))
    by = world.identity("team-a", role="admin")
    assert await world.registry.count_adapters(by) == 2
    assert await world.registry.delete_adapters(by) == 2
    assert await world.registry.count_adapters(by) == 0
    assert [a.tenant for a in (await _delta(world, 0)).adapters] == ["team-b"]


async def test_change_committed_by_another_process_becomes_visible(world: World, make_adapter: Any) -> None:
    other = create_registry(world.registry.services.settings)
    await other.start()
    before = other.epoch.current
    await world.caller().upload(A, make_adapter(1))
    async with asyncio.timeout(60):
        while other.epoch.current == before:  # noqa: ASYNC110 - the epoch is a number, not an event
            await asyncio.sleep(0.05)
    assert [a.name for a in (await other.names_delta(before)).adapters] == ["style"]
    await other.stop()
