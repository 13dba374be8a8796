"""Uploads over HTTP: what is admitted, what is refused, and that a refusal leaves nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from loraplex_registry.db.model import METADATA, EventRow
from loraplex_registry.peft.header import read_header
from loraplex_registry.peft.spec import ModuleSpec
from registry_world import World, build_tiny_spec, poison, read_folder

A = "/api/v1/tenants/team-a/adapters/style"


async def count_rows(world: World) -> dict[str, int]:
    async with world.registry.services.database.read() as session:
        counted = {}
        for name, table in METADATA.tables.items():
            counted[name] = (await session.execute(sa.select(sa.func.count()).select_from(table))).scalar_one()
    return counted


async def list_actions(world: World) -> list[str]:
    async with world.registry.services.database.read() as session:
        return list((await session.execute(sa.select(EventRow.action).order_by(EventRow.id))).scalars())


async def test_first_upload_becomes_version_one_live_and_default(world: World, make_adapter: Any) -> None:
    team = world.caller()
    answer = await team.upload(A, make_adapter(1))
    assert answer.status_code == 201, answer.text
    version = answer.json()
    shown_keys = ("tenant", "adapter", "version", "kind", "state", "promoted", "base_model", "rank", "target_modules")
    assert [version[key] for key in shown_keys] == [
        "team-a",
        "style",
        1,
        "lora",
        "ready",
        True,
        "tiny-llama",
        8,
        ["q_proj", "v_proj"],
    ]
    assert version["digest"].startswith("sha256:")
    parity = [check["verdict"] for check in version["report"]["checks"] if check["name"] == "parity"]
    assert parity == ["warn"]
    shown = (await team("GET", A)).json()
    assert (shown["live"], shown["latest"], shown["num_versions"], shown["is_default"]) == (1, 1, 1, True)
    assert (await team("GET", f"{A}/aliases/live")).headers["etag"] == '"1"'
    assert await list_actions(world) == ["base.registered", "adapter.version_created", "alias.upload"]


async def test_same_content_again_is_the_same_version(world: World, make_adapter: Any) -> None:
    team, folder = world.caller(), make_adapter(1)
    first = await team.upload(A, folder)
    again = await team.upload(A, {**read_folder(folder), "README.md": b"Another readme is the same content."})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["version"] == 1
    assert again.json()["digest"] == first.json()["digest"]


async def test_second_content_waits_for_promotion_unless_told(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    waiting = await team.upload(A, make_adapter(2))
    assert (waiting.json()["version"], waiting.json()["promoted"]) == (2, False)
    promoted = await team.upload(A, make_adapter(3), params={"promote": "always"})
    assert (promoted.json()["version"], promoted.json()["promoted"]) == (3, True)
    never = await team.upload(A.replace("style", "other"), make_adapter(4), params={"promote": "never"})
    assert never.json()["promoted"] is False


async def test_promote_always_also_moves_to_content_that_is_there(world: World, make_adapter: Any) -> None:
    team, first = world.caller(), make_adapter(1)
    await team.upload(A, first)
    await team.upload(A, make_adapter(2), params={"promote": "always"})
    again = await team.upload(A, first, params={"promote": "always"})
    assert (again.status_code, again.json()["version"], again.json()["promoted"]) == (200, 1, True)


async def test_files_come_back_byte_for_byte(world: World, make_adapter: Any) -> None:
    team = world.caller()
    sent = {**read_folder(make_adapter(1)), "README.md": "Grüße\r\n".encode()}
    await team.upload(A, sent)
    for name, content in sent.items():
        answer = await team("GET", f"{A}/versions/1/files/{name}")
        assert answer.content == content
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await team("GET", f"{A}/versions/1/files/tokenizer.json")).status_code == 404


async def test_copies_of_the_base_s_matrices_are_not_stored_and_the_manifest_names_them(
    empty_world: World, make_adapter: Any, tmp_path: Path
) -> None:
    head = bytes([1, 2, 3, 4]) * (331 * 72)
    hashes = {"lm_head": {"F32": hashlib.sha256(head).hexdigest()}}
    modules = build_tiny_spec().modules | {"lm_head": ModuleSpec(331, 72, "head")}
    spec = build_tiny_spec(modules=modules, matrix_hashes=hashes)
    await empty_world.caller(None, role="admin")("POST", "/api/v1/bases", content=msgspec.json.encode(spec))
    team, files = empty_world.caller(), read_folder(make_adapter(1))
    name = "base_model.model.lm_head.base_layer.weight"
    whole = {**files, "adapter_model.safetensors": _append_tensor(files["adapter_model.safetensors"], name, head)}
    with_copy, without = await team.upload(A, whole), await team.upload(A.replace("style", "other"), files)
    assert (with_copy.status_code, without.status_code) == (201, 201)
    digest = with_copy.json()["digest"]
    assert without.json()["digest"] == digest
    stored = (await team("GET", f"{A}/versions/1/files/adapter_model.safetensors")).content
    assert len(stored) < len(whole["adapter_model.safetensors"]) - len(head)
    (tmp_path / "stored").write_bytes(stored)
    (tmp_path / "sent").write_bytes(files["adapter_model.safetensors"])
    assert _read_tensors(tmp_path / "stored") == _read_tensors(tmp_path / "sent")
    manifest = empty_world.registry.services.store.find_manifest(digest)
    assert manifest is not None
    assert manifest.dropped == (name,)


def _append_tensor(weights: bytes, name: str, data: bytes) -> bytes:
    length = int.from_bytes(weights[:8], "little")
    header, body = json.loads(weights[8 : 8 + length]), weights[8 + length :]
    header[name] = {"dtype": "F32", "shape": [331, 72], "data_offsets": [len(body), len(body) + len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body + data


def _read_tensors(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {ref.name: data[ref.start : ref.stop] for ref in read_header(path).tensors}


async def test_equal_weights_of_two_tenants_keep_their_own_readme(world: World, make_adapter: Any) -> None:
    files = read_folder(make_adapter(1))
    ours, theirs = world.caller("team-a"), world.caller("team-b")
    b = A.replace("team-a", "team-b")
    first = await ours.upload(A, {**files, "README.md": b"secret of team-a"})
    second = await theirs.upload(b, {**files, "README.md": b"words of team-b"})
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["digest"] == second.json()["digest"]
    assert (await theirs("GET", f"{b}/versions/1/files/README.md")).content == b"words of team-b"
    assert (await ours("GET", f"{A}/versions/1/files/README.md")).content == b"secret of team-a"


def _bad_files(files: dict[str, bytes]) -> dict[str, tuple[dict[str, bytes], str]]:
    config, weights = files["adapter_config.json"], files["adapter_model.safetensors"]

    def with_config(**changes: Any) -> dict[str, bytes]:
        return {**files, "adapter_config.json": json.dumps({**json.loads(config), **changes}).encode()}

    return {
        "nan": ({**files, "adapter_model.safetensors": poison(weights)}, "non_finite"),
        "truncated": ({**files, "adapter_model.safetensors": weights[:-5]}, "truncated"),
        "trailing": ({**files, "adapter_model.safetensors": weights + b"12345"}, "header"),
        "empty": ({**files, "adapter_model.safetensors": b""}, "truncated"),
        "pickle beside": ({**files, "adapter_model.bin": b"\x80\x04."}, "pickle"),
        "pickle inside": ({**files, "adapter_model.safetensors": b"\x80\x04\x95" + b"." * 64}, "pickle"),
        "path": ({**files, "../../evil.json": b"{}"}, "file_name"),
        "windows path": ({**files, "C:\\adapter_config.json": b"{}"}, "file_name"),
        "nul": ({**files, "adapter_config.json\0.png": b"{}"}, "file_name"),
        "absolute": ({**files, "/etc/passwd": b"x"}, "file_name"),
        "unknown file": ({**files, "training_args.json": b"x"}, "file_set"),
        "no weights": ({"adapter_config.json": config}, "file_set"),
        "split": ({"adapter_config.json": config, "adapter_model_part_aa": b"x"}, "file_set"),
        "large config": ({**files, "adapter_config.json": b" " * (256 * 1024 + 1)}, "file_size"),
        "no json": ({**files, "adapter_config.json": b"{'r': 8}"}, "json"),
        "deep json": ({**files, "adapter_config.json": b"[" * 100_000}, "json"),
        "rank": (with_config(r=4096), "rank_limit"),
        "replication": (with_config(layer_replication=[[0, 2]]), "field_unsupported"),
        "dora without magnitudes": (with_config(use_dora=True), "missing_tensors"),
        "other type": (with_config(peft_type="IA3"), "peft_type"),
        "other base": (with_config(base_model_name_or_path="llama-3"), "base_mismatch"),
        "lora_alpha missing": (with_config(lora_alpha=None), "field_value"),
    }


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_refused_upload_leaves_nothing_but_an_event(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    objects = world.objects()
    for case, (files, check) in _bad_files(read_folder(make_adapter(2))).items():
        rows = await count_rows(world)
        for path in (A, A.replace("style", "fresh")):
            answer = await team.upload(path, files, params={"promote": "always"})
            assert answer.status_code == 422, (case, answer.text)
            body = answer.json()
            assert body["error"]["code"] == "adapter_rejected"
            assert body["error"]["type"] == "invalid_request_error"
            failed = [found["name"] for found in body["report"]["checks"] if found["verdict"] == "fail"]
            assert check in failed, case
        after = await count_rows(world)
        assert {**after, "registry_event": 0} == {**rows, "registry_event": 0}, case
        assert after["registry_event"] == rows["registry_event"] + 2, case
        assert world.objects() == objects, case
        assert (await team("GET", A.replace("style", "fresh"))).status_code == 404, case
    assert (await team.upload(A, make_adapter(3))).status_code == 201


async def test_dry_run_tells_and_stores_nothing_not_even_an_event(world: World, make_adapter: Any) -> None:
    team = world.caller()
    rows, objects = await count_rows(world), world.objects()
    good = await team.upload(A, make_adapter(1), params={"dry_run": "true"})
    assert good.status_code == 200
    assert good.json()["dry_run"] is True
    assert good.json()["report"]["verdict"] == "warn"
    bad = await team.upload(A, {"adapter_config.json": b"{}"}, params={"dry_run": "true"})
    assert bad.status_code == 422
    assert await count_rows(world) == rows
    assert world.objects() == objects
    assert (await team.upload(A, make_adapter(1))).json()["digest"] == good.json()["digest"]


async def test_bad_parameter_is_named(world: World, make_adapter: Any) -> None:
    for params, status, code, param in (
        ({"promote": "maybe"}, 400, "invalid_request_error", "promote"),
        ({"dry_run": "yes"}, 400, "invalid_request_error", "dry_run"),
        ({"wait": "0"}, 400, "unsupported_parameter", "wait"),
        ({"colour": "blue"}, 400, "unknown_parameter", "colour"),
        ({"base": "tiny-llama"}, 403, "permission_denied", "base"),
    ):
        answer = await world.caller().upload(A, make_adapter(1), params=params)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), params


async def test_bad_adapter_name_is_refused_before_the_body(world: World, make_adapter: Any) -> None:
    for name in ("TEAM-X", "a_b", "-a", "a-", "a.b", "x" * 64, "e\u0301", "team-x%20"):
        answer = await world.caller().upload(A.replace("style", name), make_adapter(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_name"), name


async def test_body_that_is_not_whole_multipart_is_400_and_another_kind_415(world: World) -> None:
    team = world.caller()
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    part = b'--xyz\r\nContent-Disposition: form-data; name="files"; filename="README.md"\r\n\r\nhalf'
    for body in (b"", b"no parts", part):
        answer = await team("POST", f"{A}/versions", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
    other = part.replace(b'name="files"', b'name="file"') + b"\r\n--xyz--\r\n"
    answer = await team("POST", f"{A}/versions", content=other, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter")
    assert (await team("POST", f"{A}/versions", json={})).status_code == 415
    no_boundary = {"Content-Type": "multipart/form-data"}
    assert (await team("POST", f"{A}/versions", content=part, headers=no_boundary)).status_code == 400


async def test_base_forced_by_an_admin_is_recorded(world: World, make_adapter: Any) -> None:
    admin = world.caller("team-a", role="admin")
    folder = make_adapter(1, base_model_name_or_path="/home/me/out")
    assert (await admin.upload(A, folder)).status_code == 422
    answer = await admin.upload(A, folder, params={"base": "tiny-llama"})
    assert answer.status_code == 201
    checks = {check["name"]: check["verdict"] for check in answer.json()["report"]["checks"]}
    assert checks["base_mismatch"] == "warn"
    assert (await admin.upload(A, folder, params={"base": "nope"})).status_code == 404
    # before the body, which need not even be one
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    early = await admin("POST", f"{A}/versions", content=b"no parts", headers=headers, params={"base": "nope"})
    assert (early.status_code, early.json()["error"]["param"]) == (404, "base")


async def test_without_a_base_an_upload_says_so(empty_world: World, make_adapter: Any) -> None:
    answer = await empty_world.caller().upload(A, make_adapter(1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_concurrent_uploads_get_consecutive_numbers_and_none_is_lost(world: World, make_adapter: Any) -> None:
    team = world.caller()
    folders = [make_adapter(seed) for seed in range(6)]
    answers = await asyncio.gather(*(team.upload(A, folder) for folder in folders))
    assert [answer.status_code for answer in answers] == [201] * 6
    assert sorted(answer.json()["version"] for answer in answers) == [1, 2, 3, 4, 5, 6]
    assert [answer.json()["version"] for answer in answers if answer.json()["promoted"]] == [1]
    assert len({answer.json()["digest"] for answer in answers}) == 6


async def test_concurrent_promotions_have_one_winner(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(0))
    answers = await asyncio.gather(
        *(team.upload(A, make_adapter(seed), params={"promote": "always"}) for seed in (1, 2, 3))
    )
    assert [answer.status_code for answer in answers] == [201] * 3
    won = [answer.json()["version"] for answer in answers if answer.json()["promoted"]]
    assert len(won) == 1
    assert (await team("GET", A)).json()["live"] == won[0]


async def test_concurrent_uploads_of_one_content_are_one_version(world: World, make_adapter: Any) -> None:
    team, folder = world.caller(), make_adapter(1)
    answers = await asyncio.gather(*(team.upload(A, folder) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert {answer.json()["version"] for answer in answers} == {1}


async def test_idempotency_key_does_its_work_once(world: World, make_adapter: Any) -> None:
    team, folder, headers = world.caller(), make_adapter(1), {"Idempotency-Key": "push-1"}
    first = await team.upload(A, folder, headers=headers)
    await team("DELETE", A)
    again = await team.upload(A, folder, headers=headers)
    assert (again.status_code, again.json()) == (201, first.json())
    assert (await team("GET", A)).status_code == 404
    other = await team.upload(A, make_adapter(2), headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    elsewhere = await world.caller("team-b").upload(A.replace("team-a", "team-b"), folder, headers=headers)
    assert elsewhere.status_code == 201


async def test_idempotency_key_that_is_running_is_409_and_a_refusal_frees_it(world: World, make_adapter: Any) -> None:
    team, headers = world.caller(), {"Idempotency-Key": "push-1"}
    answers = await asyncio.gather(*(team.upload(A, make_adapter(1), headers=headers) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    headers = {"Idempotency-Key": "push-2"}
    assert (await team.upload(A, {"adapter_config.json": b"{}"}, headers=headers)).status_code == 422
    assert (await team.upload(A, make_adapter(3), headers=headers)).status_code == 201


async def test_numbers_continue_when_a_deleted_name_comes_again(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    await team.upload(A, make_adapter(2))
    assert (await team("DELETE", A)).status_code == 204
    assert (await team("GET", A)).status_code == 404
    assert (await team("DELETE", A)).status_code == 404
    again = await team.upload(A, make_adapter(1))
    assert (again.status_code, again.json()["version"], again.json()["promoted"]) == (201, 3, True)
    assert [row["version"] for row in (await team("GET", f"{A}/versions")).json()["data"]] == [3]


async def test_damaged_artifact_is_healed_by_the_same_upload(world: World, make_adapter: Any, tmp_path: Path) -> None:
    team, folder = world.caller(), make_adapter(1)
    await team.upload(A, folder)
    weights = next(world.store.glob("sha256/*/*/*/files/adapter_model.safetensors"))
    weights.unlink()
    gone = await team("GET", f"{A}/versions/1/files/adapter_model.safetensors")
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "store_unavailable")
    assert (await team.upload(A, folder)).status_code == 200
    content = (await team("GET", f"{A}/versions/1/files/adapter_model.safetensors")).content
    assert content == (folder / "adapter_model.safetensors").read_bytes()


async def test_verdict_that_takes_longer_than_wait_is_503_and_stores_nothing(
    world: World, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex_registry.uploads.checker import ProcessChecker

    monkeypatch.setattr(world.registry.services.admission, "_checker", ProcessChecker(0))
    objects = world.objects()
    answer = await world.caller().upload(A, make_adapter(1), params={"wait": "1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert world.objects() == objects


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_full_disk_is_503_and_leaves_nothing(world: World, make_adapter: Any) -> None:
    team, large = world.caller(), {**read_folder(make_adapter(1)), "README.md": b"x" * (6 << 20)}
    rows, objects = await count_rows(world), world.objects()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        answer = await team.upload(A, large, headers={"Idempotency-Key": "push"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await count_rows(world), world.objects()) == (rows, objects)
    assert list((world.store / "staging").iterdir()) == []
    assert (await team.upload(A, large, headers={"Idempotency-Key": "push"})).status_code == 201
