"""Uploads in parts: announced, sent, completed once, whatever is cut or repeated in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex_registry.db.model import EventRow, UploadRow
from loraplex_registry.errors import UnavailableError
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.uploads import admission as admission_module
from loraplex_registry.uploads.sweep import Sweeper
from part_world import PART_BYTES, announce, begin, missing, send, sha256, upload
from registry_world import World, poison, read_folder

A = "/api/v1/tenants/team-a/adapters/style"


@pytest.fixture
def files(make_adapter: Any) -> dict[str, bytes]:
    """A folder one of whose files has two parts; the small one is what tests touch."""
    return {**read_folder(make_adapter(1)), "tokenizer.json": b'{"x": "' + b"y" * PART_BYTES + b'"}'}


def parts_left(world: World) -> list[str]:
    return [upload for upload, _ in world.registry.services.store.list_uploads()]


async def sweep(world: World, grace_s: float = -1.0) -> list[str]:
    services = world.registry.services
    return await Sweeper(services.database, services.store, replace(services.settings, orphan_grace_s=grace_s)).sweep()


async def change_row(world: World, **values: Any) -> None:
    await world.registry.services.database.write(lambda session: session.execute(sa.update(UploadRow).values(values)))


async def count_events(world: World, action: str) -> int:
    query = sa.select(sa.func.count()).where(EventRow.action == action)
    async with world.registry.services.database.read() as session:
        return (await session.execute(query)).scalar_one()


async def test_parts_become_the_same_version_as_one_body(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    answer = await upload(team, A, files)
    assert answer.status_code == 201, answer.text
    assert (answer.json()["version"], answer.json()["state"], answer.json()["promoted"]) == (1, "ready", True)
    for name, content in files.items():
        assert (await team("GET", f"{A}/versions/1/files/{name}")).content == content
    small = await team.upload(A, files)
    assert (small.status_code, small.json()["digest"]) == (200, answer.json()["digest"])
    assert parts_left(world) == []
    assert list((world.store / "receiving").iterdir()) == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_what_has_arrived_is_shown_and_only_the_rest_is_asked_for(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    assert (view["state"], view["received_bytes"]) == ("open", 0)
    assert view["size_bytes"] == sum(len(content) for content in files.values())
    assert [(part["file"], part["number"]) for part in view["parts"]] == [
        ("adapter_config.json", 0),
        ("adapter_model.safetensors", 0),
        ("tokenizer.json", 0),
        ("tokenizer.json", 1),
    ]
    assert {part["method"] for part in view["parts"]} == {"PUT"}
    part, content = next(missing(view, files))
    assert (await send(team, part, content)).status_code == 204
    later = (await team("GET", f"{A}/uploads/{view['id']}")).json()
    assert [part["received"] for part in later["parts"]] == [True, False, False, False]
    assert later["received_bytes"] == len(content)
    assert later["parts"][0]["url"] is None
    assert later["parts"][1]["url"] == view["parts"][1]["url"]
    early = await team("POST", f"{A}/uploads/{view['id']}/complete")
    error = early.json()["error"]
    assert (early.status_code, error["code"], error["param"]) == (409, "conflict", "parts")
    assert error["message"].startswith("3 parts have not arrived (adapter_model.safetensors 0, ")
    for part, content in missing(later, files):
        await send(team, part, content)
    assert (await team("POST", f"{A}/uploads/{view['id']}/complete")).status_code == 201


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_part_with_other_bytes_is_refused(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    part, content = next(missing(view, files))
    other = bytes([content[0] ^ 1]) + content[1:]
    tries = [
        await send(team, part, other),
        await send(team, part, content[:-1]),
        await send(team, part, content + b"x"),
        await send(team, part, b""),
        await send(team, part, content, **{"x-amz-checksum-sha256": "AAAA"}),
        await team("PUT", part["url"], content=content),
    ]
    assert [answer.status_code for answer in tries] == [400] * 6
    assert [answer.json()["error"]["param"] for answer in tries[-2:]] == ["x-amz-checksum-sha256"] * 2
    assert (await send(team, part, content, **{"Content-Encoding": "gzip"})).status_code == 415
    assert (await team("GET", f"{A}/uploads/{view['id']}")).json()["received_bytes"] == 0
    assert list((world.store / "receiving").iterdir()) == []
    for path in ("files/9/parts/0", "files/0/parts/1", "files/x/parts/0", "files/00/parts/0"):
        answer = await team("PUT", f"{A}/uploads/{view['id']}/{path}", content=content, headers=part["headers"])
        assert answer.status_code == 404, path


async def test_complete_refuses_further_parts_and_repeats_its_answer(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    first = await team("POST", f"{A}/uploads/{view['id']}/complete")
    again = await team("POST", f"{A}/uploads/{view['id']}/complete")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    late = await send(team, view["parts"][0], files["adapter_config.json"])
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    shown = (await team("GET", f"{A}/uploads/{view['id']}")).json()
    assert (shown["state"], {part["url"] for part in shown["parts"]}) == ("completed", {None})
    assert (await team("DELETE", f"{A}/uploads/{view['id']}")).status_code == 409
    assert [row["version"] for row in (await team("GET", f"{A}/versions")).json()["data"]] == [1]


async def test_one_of_many_completions_at_once_publishes(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    answers = await asyncio.gather(*(team("POST", f"{A}/uploads/{view['id']}/complete") for _ in range(6)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert 201 in {answer.status_code for answer in answers}
    assert [row["version"] for row in (await team("GET", f"{A}/versions")).json()["data"]] == [1]
    assert await count_events(world, "adapter.version_created") == 1


async def test_both_ways_at_once_give_consecutive_versions(world: World, make_adapter: Any) -> None:
    team = world.caller()
    folders = [read_folder(make_adapter(seed)) for seed in range(1, 7)]
    ways = [upload(team, A, each) if at % 2 else team.upload(A, each) for at, each in enumerate(folders)]
    answers = await asyncio.gather(*ways)
    assert [answer.status_code for answer in answers] == [201] * 6
    assert sorted(answer.json()["version"] for answer in answers) == [1, 2, 3, 4, 5, 6]
    assert sum(answer.json()["promoted"] for answer in answers) >= 1


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_refusal_is_recorded_once_and_repeated(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    bad = {**files, "adapter_model.safetensors": poison(files["adapter_model.safetensors"])}
    view = await begin(team, A, bad)
    answers = [await team("POST", f"{A}/uploads/{view['id']}/complete") for _ in range(2)]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_rejected")
    assert answers[0].json() == answers[1].json()
    assert await count_events(world, "adapter.refused") == 1
    assert parts_left(world) == []
    assert (await team("GET", A)).status_code == 404


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_whole_that_is_not_its_parts_is_refused_for_good(world: World, files: dict[str, bytes]) -> None:
    team, body = world.caller(), announce(files)
    body["files"][2]["sha256"] = "0" * 64
    view = (await team("POST", f"{A}/uploads", json=body)).json()
    for part, content in missing(view, files):
        await send(team, part, content)
    for _ in range(2):
        answer = await team("POST", f"{A}/uploads/{view['id']}/complete")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "files[2].sha256")
    assert parts_left(world) == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_dry_run_in_parts_stores_nothing(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    objects = world.objects()
    view = await begin(team, A, files, params={"dry_run": "true"})
    first = await team("POST", f"{A}/uploads/{view['id']}/complete")
    assert (first.status_code, first.json()["dry_run"]) == (200, True)
    assert (await team("POST", f"{A}/uploads/{view['id']}/complete")).json() == first.json()
    assert world.objects() == objects
    assert (await team("GET", A)).status_code == 404


class SlowJudge:
    """An engine that answers once the test lets it."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    def has_engine(self, base: str) -> bool:
        return True

    async def measure(self, base: str, digest: str, rank: int, weights: str | None = None) -> ParityResult | None:
        await self.may_answer.wait()
        numbers = dict.fromkeys(("max_logit_difference", "max_kl", "base_logit_difference", "base_kl"), 0.0)
        return ParityResult(dtype="float32", num_prompts=1, num_positions=9, logit_limit=1.0, kl_limit=1.0, **numbers)


async def test_version_that_the_gate_looks_at_is_answered_and_known_later(
    world: World, files: dict[str, bytes]
) -> None:
    judge, team = SlowJudge(), world.caller()
    world.registry.know_parity(judge, lambda verdict: None)
    view = await begin(team, A, files)
    path = f"{A}/uploads/{view['id']}/complete"
    first = await team("POST", path, params={"wait": "1"})
    assert (first.status_code, first.json()["state"], first.json()["promoted"]) == (201, "validating", False)
    same = await team.upload(A, files, params={"promote": "always", "wait": "1"})
    assert (same.status_code, same.json()["version"], same.json()["state"]) == (200, 1, "validating")
    assert parts_left(world) == []
    judge.may_answer.set()
    again = await team("POST", path)
    assert (again.status_code, again.json()["state"], again.json()["promoted"]) == (201, "ready", True)
    assert (await team("POST", path)).json() == again.json()


async def test_always_is_compared_with_what_was_live_when_the_upload_began(
    world: World, make_adapter: Any, files: dict[str, bytes]
) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(2))
    late = await begin(team, A, files, params={"promote": "always"})
    await team.upload(A, make_adapter(3), params={"promote": "always"})
    answer = await team("POST", f"{A}/uploads/{late['id']}/complete")
    assert (answer.status_code, answer.json()["version"], answer.json()["promoted"]) == (201, 3, False)
    assert (await team("GET", A)).json()["live"] == 2


def _bad_bodies(good: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int, str, str | None]]:
    """What is announced wrongly, and how that is answered: status, code, param."""

    def change(**changes: Any) -> dict[str, Any]:
        return {"files": [{**good["files"][0], **changes}, *good["files"][1:]]}

    bad = "invalid_request_error"
    yield {"files": []}, 422, "adapter_rejected", "adapter_config.json"
    yield {"files": good["files"][:1]}, 422, "adapter_rejected", "adapter_model.safetensors"
    yield {"files": good["files"], "x": 1}, 400, "unknown_parameter", "x"
    yield change(name="../../evil.json"), 422, "adapter_rejected", "files"
    yield change(name="adapter_model.bin"), 422, "adapter_rejected", "adapter_config.json"
    yield change(size=-1), 400, bad, "files[0].size"
    yield change(size=1.5), 400, bad, "files[0].size"
    yield change(size=2**70), 400, bad, "files[0].part_sha256"
    yield change(part_size=PART_BYTES - 1), 400, bad, "files[0].part_size"
    yield change(part_size=(64 << 20) + 1), 400, bad, "files[0].part_size"
    yield change(part_sha256=[]), 400, bad, "files[0].part_sha256"
    yield change(part_sha256=["A" * 64]), 400, bad, "files[0].part_sha256"
    yield change(sha256="0" * 64), 400, bad, "files[0].sha256"
    yield change(sha256="zz"), 400, bad, "files[0].sha256"
    size = 300 * 1024
    whole = {"size": size, "part_sha256": ["0" * 64], "sha256": "0" * 64}
    yield change(**whole), 422, "adapter_rejected", "adapter_config.json"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_wrong_announcements_are_named(world: World, make_adapter: Any) -> None:
    team = world.caller()
    good = announce(read_folder(make_adapter(1)))
    for body, status, code, param in _bad_bodies(good):
        answer = await team("POST", f"{A}/uploads", json=body)
        assert answer.status_code == status, (body, answer.text)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, param), body
    for params, param in (({"promote": "x"}, "promote"), ({"wait": "5"}, "wait")):
        answer = await team("POST", f"{A}/uploads", json=good, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await team("POST", f"{A}/uploads", json=good, params={"base": "tiny-llama"})).status_code == 403
    admin = world.caller("team-a", role="admin")
    unknown = await admin("POST", f"{A}/uploads", json=good, params={"base": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "base")
    assert (await admin("POST", f"{A}/uploads", json=good, params={"base": "tiny-llama"})).status_code == 201
    assert (await team("POST", A.replace("style", "Style") + "/uploads", json=good)).status_code == 400
    nine = {"size": 8 << 30, "part_size": 64 << 20, "part_sha256": ["0" * 64] * 128, "sha256": "0" * 64}
    large = {"files": [*good["files"], *({**nine, "name": name} for name in ("tokenizer.json", "vocab.json"))]}
    answer = await team("POST", f"{A}/uploads", json=large)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_empty_files_have_no_parts(world: World, make_adapter: Any) -> None:
    team = world.caller()
    answer = await upload(team, A, {**read_folder(make_adapter(1)), "README.md": b""})
    assert answer.status_code == 201, answer.text
    assert (await team("GET", f"{A}/versions/1/files/README.md")).content == b""
    assert sha256(b"").startswith("e3b0")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_another_tenant_or_scope_sees_nothing(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = (await team("POST", f"{A}/uploads", json=announce(files))).json()
    path = f"uploads/{view['id']}"
    reader = world.caller(scopes=("adapters:read",))
    # it would get addresses that take parts
    assert (await reader("GET", f"{A}/{path}")).status_code == 403
    assert (await reader("POST", f"{A}/{path}/complete")).status_code == 403
    assert (await send(reader, view["parts"][0], files["adapter_config.json"])).status_code == 403
    other = world.caller("team-b")
    b = A.replace("team-a", "team-b")
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/complete"), ("PUT", "/files/0/parts/0")):
        assert (await other(method, f"{b}/{path}{end}")).status_code == 404
        assert (await team(method, f"{A.replace('style', 'other')}/{path}{end}")).status_code == 404
        assert (await team(method, f"{A}/uploads/upl_nothing%00{end}")).status_code == 404


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_deleted_upload_is_unknown_and_its_parts_are_gone(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    assert (await team("DELETE", f"{A}/uploads/{view['id']}")).status_code == 204
    assert parts_left(world) == []
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/complete")):
        assert (await team(method, f"{A}/uploads/{view['id']}{end}")).status_code == 404
    assert (await send(team, view["parts"][0], files["adapter_config.json"])).status_code == 404


async def test_key_repeats_the_same_upload_and_the_same_completion(
    world: World, files: dict[str, bytes], make_adapter: Any
) -> None:
    team, key = world.caller(), {"Idempotency-Key": "push-1"}
    first = await team("POST", f"{A}/uploads", json=announce(files), headers=key)
    part, content = next(missing(first.json(), files))
    await send(team, part, content)
    again = await team("POST", f"{A}/uploads", json=announce(files), headers=key)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert again.json()["parts"][0]["received"] is True
    other = await team("POST", f"{A}/uploads", json=announce(read_folder(make_adapter(2))), headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    for part, content in missing(again.json(), files):
        await send(team, part, content)
    path = f"{A}/uploads/{first.json()['id']}/complete"
    answers = [await team("POST", path, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()


async def test_completion_that_died_is_taken_over(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    await change_row(world, state="completing", touched_at=datetime.now(UTC))
    path = f"{A}/uploads/{view['id']}"
    held = await team("POST", f"{path}/complete")
    assert (held.status_code, held.json()["error"]["code"]) == (409, "conflict")
    assert (await team("DELETE", path)).status_code == 409
    assert (await send(team, view["parts"][0], files["adapter_config.json"])).status_code == 409
    await change_row(world, touched_at=datetime.now(UTC) - timedelta(seconds=61))
    assert (await team("POST", f"{path}/complete")).status_code == 201


async def test_failed_completion_may_be_repeated(
    world: World, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = world.caller()
    view = await begin(team, A, files)

    async def fail(*args: Any) -> None:
        raise UnavailableError

    with monkeypatch.context() as patch:
        patch.setattr(admission_module, "publish", fail)
        answer = await team("POST", f"{A}/uploads/{view['id']}/complete", headers={"Idempotency-Key": "k"})
    assert answer.status_code == 503
    assert (await team("GET", f"{A}/uploads/{view['id']}")).json()["state"] == "open"
    answer = await team("POST", f"{A}/uploads/{view['id']}/complete", headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201


async def test_expired_uploads_and_parts_without_a_row_are_swept(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    await sweep(world)
    assert (await team("GET", f"{A}/uploads/{view['id']}")).json()["received_bytes"] == view["size_bytes"]
    await change_row(world, created_at=datetime.now(UTC) - timedelta(days=2), expires_at=datetime.now(UTC))
    assert (await team("POST", f"{A}/uploads/{view['id']}/complete")).status_code == 404
    await sweep(world, 3600)
    assert parts_left(world) == [view["id"]], "parts without a row wait for the grace time"
    await sweep(world)
    assert parts_left(world) == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_parts_that_came_after_the_end_are_swept(world: World, files: dict[str, bytes]) -> None:
    team = world.caller()
    view = await begin(team, A, files)
    await change_row(world, state="aborted")
    await sweep(world, 3600)
    assert parts_left(world) == []
    assert (await team("GET", f"{A}/uploads/{view['id']}")).status_code == 404


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_tenant_has_so_many_open_uploads(
    world: World, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex_registry.uploads import upload_row

    monkeypatch.setattr(upload_row, "MAX_OPEN", 2)
    team = world.caller()
    views = [(await team("POST", f"{A}/uploads", json=announce(files))).json() for _ in range(2)]
    full = await team("POST", f"{A}/uploads", json=announce(files))
    assert (full.status_code, full.json()["error"]["code"]) == (409, "conflict")
    await team("DELETE", f"{A}/uploads/{views[0]['id']}")
    assert (await team("POST", f"{A}/uploads", json=announce(files))).status_code == 201
