"""Bases over HTTP: registered once by fingerprint, further names learnt, admins only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from loraplex_registry.db.model import EventRow
from registry_world import World, build_tiny_spec

BASES = "/api/v1/bases"
Q = "model.layers.0.self_attn.q_proj"


def _body(**changes: Any) -> dict[str, Any]:
    return msgspec.to_builtins(build_tiny_spec(**changes))


async def test_register_is_idempotent_and_learns_names(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")
    first = await admin("POST", BASES, json=_body(accepted_names=("org/Tiny",)))
    again = await admin("POST", BASES, json=_body(accepted_names=("org/Tiny",)))
    other = await admin("POST", BASES, json=_body(name="tiny-copy"))
    assert [answer.status_code for answer in (first, again, other)] == [201, 200, 200]
    assert again.json() == first.json()
    assert (other.json()["name"], other.json()["accepted_names"]) == ("tiny-llama", ["org/Tiny", "tiny-copy"])
    assert [base["name"] for base in (await admin("GET", BASES)).json()["data"]] == ["tiny-llama"]


async def test_hashes_of_matrices_are_learnt_once_and_go_with_the_weights(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")
    first, second = ({Q: {"F32": digit * 64}} for digit in "12")
    assert (await admin("POST", BASES, json=_body())).json()["matrix_hashes"] == {}
    for body, expected in (
        (_body(matrix_hashes=second, weights_digest=""), {}),
        (_body(matrix_hashes=first), first),
        (_body(matrix_hashes=second), first),
        (_body(), first),
        (_body(matrix_hashes=second, weights_digest="other"), second),
        (_body(matrix_hashes=first, weights_digest=""), second),
    ):
        assert (await admin("POST", BASES, json=body)).json()["matrix_hashes"] == expected
    [shown] = (await admin("GET", BASES)).json()["data"]
    assert (shown["matrix_hashes"], shown["max_saved_bytes"]) == (second, 2 * 1024**3)


async def test_the_last_registration_says_which_weights_are_served(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")

    async def register(digest: str) -> str:
        answer = await admin("POST", BASES, json=_body(weights_digest=digest))
        [known] = (await empty_world.registry.names_delta(0)).bases
        assert known.weights_digest == answer.json()["weights_digest"]
        return str(known.weights_digest)

    assert [await register(digest) for digest in ("", "w1", "", "w2", "w2")] == ["", "w1", "w1", "w2", "w2"]
    async with empty_world.registry.services.database.read() as session:
        rows = (
            await session.execute(select(EventRow.details).where(EventRow.action == "base.weights_changed"))
        ).scalars()
        changes = [(details["before"]["weights_digest"], details["after"]["weights_digest"]) for details in rows]
    assert changes == [("", "w1"), ("w1", "w2")]


async def test_the_last_registration_says_what_rank_is_taken(world: World, make_adapter: Any) -> None:
    admin, team = world.caller(None, role="admin"), world.caller("team-a")
    path = "/api/v1/tenants/team-a/adapters/style"

    async def limit(rank: int) -> int:
        answer = await admin("POST", BASES, json=_body(max_lora_rank=rank))
        assert answer.status_code == 200
        [known] = (await world.registry.names_delta(0)).bases
        assert known.max_lora_rank == answer.json()["max_lora_rank"]
        return int(answer.json()["max_lora_rank"])

    assert await limit(4) == 4
    refused = await team.upload(path, make_adapter(1, rank=8))
    assert refused.status_code == 422
    [failed] = [check for check in refused.json()["report"]["checks"] if check["verdict"] == "fail"]
    assert (failed["name"], "--max-lora-rank 8" in failed["message"]) == ("rank_limit", True)
    assert await limit(8) == 8
    assert (await team.upload(path, make_adapter(1, rank=8))).status_code == 201
    [named] = (await world.registry.names_delta(0)).adapters
    assert [version.rank for version in named.versions] == [8]
    before = world.registry.epoch.current
    assert await limit(8) == 8
    assert (await world.registry.names_delta(before)).bases == ()


async def test_modules_may_be_bare_shapes(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")
    body = _body() | {"modules": {"model.layers.0.self_attn.q_proj": [120, 72]}}
    shown = (await admin("POST", BASES, json=body)).json()
    assert shown["modules"]["model.layers.0.self_attn.q_proj"]["out_features"] == 120


async def test_name_of_another_base_or_tenant_is_reserved(world: World, make_adapter: Any) -> None:
    admin = world.caller(None, role="admin")
    await world.caller("team-a").upload("/api/v1/tenants/team-a/adapters/style", make_adapter(1))
    for name in ("tiny-llama", "team-a"):
        answer = await admin("POST", BASES, json=_body(name=name, fingerprint="other"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_reserved")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_bad_field_is_named(empty_world: World) -> None:
    for change, param in (
        ({"name": "Tiny"}, "name"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"max_lora_rank": 257}, "max_lora_rank"),
        ({"modules": {}}, "modules"),
        ({"modules": {"a": [0, 1]}}, "modules"),
        ({"modules": {"a": [1, 2**70]}}, "modules"),
        ({"modules": {"a..b": [1, 1]}}, "modules"),
        ({"modules": {"a b": [1, 1]}}, "modules"),
        ({"vocab_size": 2**70}, "vocab_size"),
        ({"max_saved_bytes": -1}, "max_saved_bytes"),
        ({"matrix_hashes": {"elsewhere": {"F32": "0" * 64}}}, "matrix_hashes"),
        ({"matrix_hashes": {Q: {"F64": "0" * 64}}}, "matrix_hashes"),
        ({"matrix_hashes": {Q: {"F32": "x"}}}, "matrix_hashes"),
        ({"colour": 1}, "colour"),
    ):
        answer = await empty_world.caller(None, role="admin")("POST", BASES, json=_body() | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change


async def test_an_unknown_parameter_is_refused(world: World) -> None:
    answer = await world.caller(None, role="admin")("POST", BASES, json=_body(), params={"colour": "blue"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter")


async def test_only_platform_keys_read_and_only_admins_write(world: World) -> None:
    assert (await world.caller("team-a")("GET", BASES)).status_code == 403
    reader = world.caller(None, role="admin_readonly")
    assert (await reader("GET", BASES)).status_code == 200
    assert (await reader("POST", BASES, json=_body())).status_code == 403


async def test_config_chooses_among_several_bases(world: World, make_adapter: Any) -> None:
    admin, team = world.caller(None, role="admin"), world.caller()
    await admin("POST", BASES, json=_body(name="bigger", fingerprint="b", accepted_names=("org/Bigger", "shared")))
    await admin("POST", BASES, json=_body(name="other", fingerprint="o", accepted_names=("shared",)))
    path = "/api/v1/tenants/team-a/adapters/"
    chosen = await team.upload(f"{path}a", make_adapter(1, base_model_name_or_path="org/Bigger"))
    assert (chosen.status_code, chosen.json()["base_model"]) == (201, "bigger")
    for seed, name in ((2, "unknown"), (3, "shared")):
        refused = await team.upload(f"{path}b", make_adapter(seed, base_model_name_or_path=name))
        assert refused.status_code == 422
        assert refused.json()["report"]["checks"][0]["name"] == "base_mismatch"
    moved = await team.upload(f"{path}a", make_adapter(4))
    assert moved.status_code == 422
    forced = await world.caller("team-a", role="admin").upload(
        f"{path}a", make_adapter(5), params={"base": "tiny-llama"}
    )
    assert forced.status_code == 409


async def test_a_module_takes_no_field_that_nobody_knows(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")
    module = {"out_features": 8, "in_features": 8}
    short = await admin("POST", BASES, json=_body(name="short", fingerprint="s") | {"modules": {Q: module}})
    assert (short.status_code, short.json()["modules"][Q]["kind"]) == (201, "linear")
    misspelt = await admin("POST", BASES, json=_body() | {"modules": {Q: module | {"has_bais": True}}})
    assert (misspelt.status_code, misspelt.json()["error"]["code"]) == (400, "unknown_parameter")


async def test_a_cursor_has_one_spelling(empty_world: World) -> None:
    admin = empty_world.caller(None, role="admin")
    for cursor in ("", "=", "!", "dGlueQ", "dGlueQ==!", "dGlu eQ=="):
        answer = await admin("GET", BASES, params={"cursor": cursor})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cursor"), cursor
