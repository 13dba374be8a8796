"""What a tenant may store: judged before bytes are read, and exactly when a version is written."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from loraplex_registry.wire.identity import AdapterLimits
from part_world import announce, begin, upload
from registry_world import World, read_folder

A = "/api/v1/tenants/team-a/adapters/style"


def check_refused(answer: httpx.Response, param: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (429, "quota_exceeded", param), answer.text
    assert (error["type"], answer.headers["retry-after"]) == ("rate_limit_error", "3600")
    message: str = error["message"]
    return message


async def test_versions_are_counted_over_all_adapters_and_states(world: World, make_adapter: Any) -> None:
    team = world.caller(limits=AdapterLimits(adapter_versions=2))
    await team.upload(A, make_adapter(1))
    await team.upload(A, make_adapter(2), params={"promote": "always"})
    full = await team.upload(A.replace("style", "other"), make_adapter(3))
    assert check_refused(full, "adapter_versions").startswith("This tenant has 2 versions and may have 2")
    assert (await team("GET", A.replace("style", "other"))).status_code == 404
    assert (await team.upload(A, make_adapter(1))).status_code == 200, "the same content needs no room"
    assert (await team("DELETE", f"{A}/versions/1")).status_code == 200
    check_refused(await team.upload(A, make_adapter(3)), "adapter_versions")
    assert (await team("DELETE", A)).status_code == 204
    check_refused(await team.upload(A, make_adapter(3)), "adapter_versions")
    assert (await world.caller("team-b").upload(A.replace("team-a", "team-b"), make_adapter(3))).status_code == 201
    check_refused(await team.upload(A, make_adapter(4), params={"dry_run": "true"}), "adapter_versions")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_bytes_are_judged_before_the_body_is_read(world: World, make_adapter: Any) -> None:
    files = read_folder(make_adapter(1))
    size = sum(len(content) for content in files.values())
    assert (await world.caller(limits=AdapterLimits(adapter_bytes=size)).upload(A, files)).status_code == 201
    team = world.caller(limits=AdapterLimits(adapter_bytes=2 * size - 1))
    read: list[bytes] = []

    async def body() -> Any:
        read.append(b"x")
        yield b"x"

    headers = {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": str(size + (17 << 10))}
    early = await team("POST", f"{A}/versions", content=body(), headers=headers)
    assert f"stores {size} bytes and may store {2 * size - 1}" in check_refused(early, "adapter_bytes")
    assert read == []
    check_refused(await team.upload(A, make_adapter(2)), "adapter_bytes")
    exact = world.caller(limits=AdapterLimits(adapter_bytes=2 * size))
    assert (await exact.upload(A, make_adapter(2))).status_code == 201


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_finished_key_is_answered_though_nothing_more_fits(world: World, make_adapter: Any) -> None:
    files, key = read_folder(make_adapter(1)), {"Idempotency-Key": "k"}
    large = {**files, "README.md": b"x" * (64 << 10)}
    size = sum(len(content) for content in large.values())
    team = world.caller(limits=AdapterLimits(adapter_bytes=size))
    answers = [await team.upload(A, large, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    check_refused(await team.upload(A, large, headers={"Idempotency-Key": "other"}), "adapter_bytes")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_uploads_in_parts_count_from_their_announcement(world: World, make_adapter: Any) -> None:
    first, second = read_folder(make_adapter(1)), read_folder(make_adapter(2))
    size = sum(len(content) for content in first.values())
    team = world.caller(limits=AdapterLimits(adapter_bytes=size))
    check_refused(
        await world.caller(limits=AdapterLimits(adapter_bytes=size - 1))("POST", f"{A}/uploads", json=announce(first)),
        "adapter_bytes",
    )
    view = await begin(team, A, first)
    told = check_refused(await team("POST", f"{A}/uploads", json=announce(second)), "adapter_bytes")
    assert f"uploads in parts announced {size} more" in told
    answer = await team("POST", f"{A}/uploads/{view['id']}/complete")
    assert answer.status_code == 201, answer.text
    check_refused(await team("POST", f"{A}/uploads", json=announce(second)), "adapter_bytes")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_upload_that_finds_no_room_at_its_end_stays_open(world: World, make_adapter: Any) -> None:
    team = world.caller(limits=AdapterLimits(adapter_versions=1))
    view = await begin(team, A, read_folder(make_adapter(1)))
    await team.upload(A, make_adapter(2))
    check_refused(await team("POST", f"{A}/uploads/{view['id']}/complete"), "adapter_versions")
    more = world.caller(limits=AdapterLimits(adapter_versions=2))
    assert (await more("POST", f"{A}/uploads/{view['id']}/complete")).json()["version"] == 2


async def test_uploads_at_once_never_pass_the_limit(world: World, make_adapter: Any) -> None:
    team = world.caller(limits=AdapterLimits(adapter_versions=3))
    folders = [make_adapter(seed) for seed in range(1, 8)]
    answers = await asyncio.gather(*(team.upload(A, folder) for folder in folders))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 4
    assert sorted(answer.json()["version"] for answer in answers if answer.status_code == 201) == [1, 2, 3]


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_rank_is_a_check_of_the_report(world: World, make_adapter: Any) -> None:
    low = world.caller(limits=AdapterLimits(adapter_rank=7))
    for answer in (await low.upload(A, make_adapter(1)), await upload(low, A, read_folder(make_adapter(1)))):
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_rejected")
        failed = [check for check in answer.json()["report"]["checks"] if check["verdict"] == "fail"]
        assert [(check["name"], check["subject"]) for check in failed] == [("quota", "r")]
        assert failed[0]["message"].startswith("The adapter has rank 8, and this tenant may use 7;")
    admin = world.caller(role="admin", limits=AdapterLimits(adapter_rank=7))
    assert (await admin.upload(A, make_adapter(1))).status_code == 422, "limits are the tenant's, whoever calls"
    answer = await world.caller(limits=AdapterLimits(adapter_rank=8)).upload(A, make_adapter(1))
    assert answer.status_code == 201
    assert [check["verdict"] for check in answer.json()["report"]["checks"] if check["name"] == "quota"] == ["pass"]
