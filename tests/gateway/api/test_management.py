"""Tenants, keys, models, reports and errors through the whole application, without sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway_world import ADMIN_KEY, BASE, GatewayWorld, check_error, enclosed_world
from loraplex.usage.record import Done, RequestRow, Settlement

TENANTS = "/api/v1/tenants"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        yield found


class TestDoor:
    """401, 403 and 404."""

    async def test_a_route_that_is_not_served_says_what_to_use(self, world: GatewayWorld) -> None:
        for method, path, code in (
            ("POST", "/v1/embeddings", "embeddings_not_served"),
            ("POST", "/v1/responses", "use_chat_completions"),
            ("DELETE", "/v1/responses/resp_1", "use_chat_completions"),
        ):
            check_error(await world.call(method, path), 404, code)
            check_error(await world.call(method, path, key=None), 401, "invalid_api_key")

    @pytest.mark.parametrize("path", [TENANTS, "/v1/models", "/api/v1/bases", "/api/v1/usage"])
    async def test_no_route_opens_without_a_valid_key(self, world: GatewayWorld, path: str) -> None:
        for authorization in ("", "Bearer", "Bearer ", "Bearer wrong", f"Basic {ADMIN_KEY}", f"Bearer {ADMIN_KEY}x"):
            response = await world.http.get(path, headers={"authorization": authorization})
            check_error(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer", authorization
        check_error(await world.http.get(path), 401, "invalid_api_key")

    async def test_a_foreign_tenant_and_a_missing_one_look_the_same(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        await world.create_tenant("team-y")
        key = await world.create_key("team-x", scopes=["infer", "adapters:read", "keys:write", "usage:read"])
        for path in ("", "/keys", "/adapters", "/adapters/default"):
            foreign = await world.call("GET", f"{TENANTS}/team-y{path}", key=key)
            missing = await world.call("GET", f"{TENANTS}/team-z{path}", key=key)
            assert check_error(foreign, 404, "not_found", "tenant") == check_error(missing, 404, "not_found", "tenant")
        check_error(await world.call("GET", "/api/v1/usage?tenant=team-y", key=key), 404, "not_found", "tenant")
        told = check_error(await world.call("GET", f"{TENANTS}/team-z/adapters"), 404, "not_found", "tenant")
        assert "`loraplex tenants create team-z`" in told
        told = check_error(await world.call("GET", f"{TENANTS}/Team%20Z"), 404, "not_found", "tenant")
        assert "tenants create" not in told

    async def test_an_own_resource_without_the_scope_is_forbidden(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        key = await world.create_key("team-x", scopes=[])
        for method, path in (
            ("GET", f"{TENANTS}/team-x/keys"),
            ("GET", f"{TENANTS}/team-x/adapters"),
            ("GET", "/api/v1/usage"),
            ("GET", "/api/v1/audit"),
            ("GET", "/api/v1/fleet"),
            ("GET", "/v1/models"),
            ("POST", TENANTS),
            ("DELETE", f"{TENANTS}/team-x"),
            ("PATCH", f"{TENANTS}/team-x"),
        ):
            check_error(await world.call(method, path, key=key, json={"name": "a"}), 403, "permission_denied")
        assert (await world.call("GET", f"{TENANTS}/team-x", key=key)).status_code == 200

    async def test_a_suspended_tenants_keys_are_forbidden(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        key = await world.create_key("team-x")
        changed = await world.call("PATCH", f"{TENANTS}/team-x", json={"state": "suspended"})
        assert changed.json()["state"] == "suspended"
        check_error(await world.call("GET", "/v1/models", key=key), 403, "tenant_suspended")
        await world.call("PATCH", f"{TENANTS}/team-x", json={"state": "active"})
        assert (await world.call("GET", "/v1/models", key=key)).status_code == 200

    async def test_a_read_only_admin_reads_everything_and_changes_nothing(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        key = await world.create_key("team-x", role="admin_readonly", owner="auditor")
        for path in (TENANTS, f"{TENANTS}/team-x", f"{TENANTS}/team-x/keys", "/api/v1/usage", "/api/v1/fleet"):
            assert (await world.call("GET", path, key=key)).status_code == 200, path
        for method, path in (
            ("POST", TENANTS),
            ("POST", f"{TENANTS}/team-x/keys"),
            ("DELETE", f"{TENANTS}/team-x"),
            ("POST", "/v1/completions"),
        ):
            response = await world.call(method, path, key=key, json={"name": "a", "model": BASE})
            check_error(response, 403, "permission_denied")

    async def test_the_engine_key_opens_artifacts_and_nothing_else(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        digest = (await world.push("team-x"))["digest"]
        manifest = f"/internal/artifacts/{digest}/manifest"
        assert (await world.call("GET", manifest, key="the-engine-key")).status_code == 200
        for key in (ADMIN_KEY, "the-engine-keys", "", None):
            check_error(await world.call("GET", manifest, key=key), 401, "invalid_api_key")
        check_error(await world.call("GET", TENANTS, key="the-engine-key"), 401, "invalid_api_key")
        check_error(await world.call("GET", "/internal/names", key=ADMIN_KEY), 404, "not_found")

    async def test_metrics_need_a_scope_unless_the_caller_is_this_machine(self, world: GatewayWorld) -> None:
        assert (await world.call("GET", "/metrics", key=None)).status_code == 200
        forwarded = {"x-forwarded-for": "192.0.2.7"}
        check_error(await world.call("GET", "/metrics", key=None, headers=forwarded), 401, "invalid_api_key")
        await world.create_tenant("team-x")
        weak, strong = await world.create_key("team-x"), await world.create_key("team-x", scopes=["metrics:read"])
        check_error(await world.call("GET", "/metrics", key=weak), 403, "permission_denied")
        assert (await world.call("GET", "/metrics", key=strong, headers=forwarded)).status_code == 200

    async def test_probes_need_no_key(self, world: GatewayWorld) -> None:
        assert (await world.call("GET", "/healthz", key=None)).json() == {"status": "alive"}
        ready = await world.call("GET", "/readyz", key=None)
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "problem": None})


class TestErrors:
    """One shape, whoever refuses."""

    async def test_unknown_routes_methods_and_bodies(self, world: GatewayWorld) -> None:
        check_error(await world.call("GET", "/nothing/here"), 404, "not_found")
        response = await world.call("PUT", TENANTS)
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "GET, HEAD, POST"
        check_error(await world.call("POST", TENANTS, content=b"{" * 50), 400, "invalid_json")
        check_error(await world.call("POST", TENANTS, content=b"\xff"), 400, "invalid_json")
        form = {"content-type": "application/x-www-form-urlencoded"}
        check_error(await world.call("POST", TENANTS, content=b"a=b", headers=form), 415, "unsupported_media_type")
        check_error(await world.call("POST", "/v1/completions", content=b"[]"), 400, "invalid_json")
        for path in (TENANTS, "/v1/chat/completions", "/v1/completions", "/v1/tokenize"):
            packed = await world.call("POST", path, content=b"{}", headers={"content-encoding": "gzip"})
            check_error(packed, 415, "unsupported_media_type")

    async def test_no_route_ignores_a_parameter_that_nobody_knows(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        for method, path, body in (
            ("GET", TENANTS, None),
            ("POST", TENANTS, {"name": "team-y"}),
            ("GET", f"{TENANTS}/team-x", None),
            ("PATCH", f"{TENANTS}/team-x", {}),
            ("DELETE", f"{TENANTS}/team-x", None),
            ("POST", f"{TENANTS}/team-x/keys", {"name": "a"}),
            ("GET", f"{TENANTS}/team-x/keys", None),
            ("DELETE", f"{TENANTS}/team-x/keys/key_a", None),
            ("GET", "/api/v1/fleet", None),
            ("GET", "/api/v1/usage", None),
            ("GET", "/api/v1/audit", None),
            ("GET", "/openapi.json", None),
        ):
            response = await world.call(method, path, params={"verbose": "1"}, json=body)
            check_error(response, 400, "unknown_parameter", "verbose")

    async def test_head_is_get_without_a_body(self, world: GatewayWorld) -> None:
        for path in ("/healthz", "/v1/models", TENANTS):
            head, get = await world.call("HEAD", path), await world.call("GET", path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-length"] == get.headers["content-length"]
        assert (await world.call("HEAD", "/v1/completions")).headers["allow"] == "POST"

    async def test_an_empty_or_misspelt_value_is_not_the_same_as_none(self, world: GatewayWorld) -> None:
        for query in ("cursor=", "cursor=!", "cursor=AAAAAAAAAAAAAAAAAAAAAAA", "group_by="):
            path = "/api/v1/usage" if query.startswith("group") else TENANTS
            refused = await world.call("GET", f"{path}?{query}")
            check_error(refused, 400, "invalid_request_error", query.partition("=")[0])

    @pytest.mark.parametrize("key", [None, ADMIN_KEY], ids=["no key", "admin"])
    async def test_no_preflight_is_answered(self, world: GatewayWorld, key: str | None) -> None:
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        for path, allowed in (
            ("/v1/chat/completions", "POST"),
            ("/v1/models", "GET, HEAD"),
            ("/v1/models/x", "GET, HEAD"),
            ("/healthz", "GET, HEAD"),
        ):
            response = await world.call("OPTIONS", path, key=key, headers=asked)
            check_error(response, 405, "method_not_allowed")
            assert response.headers["allow"] == allowed, path
            assert not [name for name in response.headers if name.startswith("access-control")]

    async def test_bodies_are_bounded(self, world: GatewayWorld) -> None:
        big = b'{"name": "' + b"a" * (1 << 20) + b'"}'
        check_error(await world.call("POST", TENANTS, content=big), 413, "payload_too_large")
        bigger = b'{"model": "' + b"a" * (4 << 20) + b'"}'
        check_error(await world.call("POST", "/v1/completions", content=bigger), 413, "payload_too_large")
        medium = json.dumps({"model": "nobody", "prompt": "x" * (2 << 20)}).encode()
        check_error(await world.call("POST", "/v1/completions", content=medium), 404, "model_not_found", "model")

    async def test_what_nobody_expected_is_an_internal_error(
        self, world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(name: str) -> Any:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(world.gateway.directory, "find_tenant", fail)
        message = check_error(await world.call("GET", f"{TENANTS}/team-x"), 500, "internal_error")
        assert "secret" not in message

    async def test_a_clients_request_id_never_replaces_ours(self, world: GatewayWorld) -> None:
        response = await world.call("GET", "/healthz", headers={"x-request-id": "req_mine"})
        assert response.headers.get_list("x-request-id") != ["req_mine"]
        assert len(response.headers.get_list("x-request-id")) == 1


class TestTenants:
    """Create, show, change, delete."""

    async def test_a_tenant_lives_and_dies(self, world: GatewayWorld) -> None:
        created = await world.call("POST", TENANTS, json={"name": "team-x", "display_name": "Team X", "bases": [BASE]})
        assert created.status_code == 201
        tenant = created.json()
        assert tenant == {
            "name": "team-x",
            "display_name": "Team X",
            "state": "active",
            "bases": [BASE],
            "limits": {},
            "weight": 1,
            "created_at": tenant["created_at"],
        }
        assert datetime.fromisoformat(tenant["created_at"]).tzinfo is not None
        assert (await world.call("GET", f"{TENANTS}/team-x")).json() == tenant
        changed = await world.call("PATCH", f"{TENANTS}/team-x", json={"display_name": None, "bases": None})
        assert changed.json() == tenant | {"display_name": None, "bases": None}
        assert (await world.call("PATCH", f"{TENANTS}/team-x", json={})).json() == changed.json()
        assert (await world.call("DELETE", f"{TENANTS}/team-x")).status_code == 204
        check_error(await world.call("GET", f"{TENANTS}/team-x"), 404, "not_found", "tenant")
        check_error(await world.call("POST", TENANTS, json={"name": "team-x"}), 409, "name_reserved", "name")

    async def test_limits_are_merged_and_hold_uploads(self, world: GatewayWorld) -> None:
        path = f"{TENANTS}/team-x"
        limits = {"adapter_versions": 1, "adapter_rank": 2, "adapter_bytes": None}
        created = await world.call("POST", TENANTS, json={"name": "team-x", "limits": limits})
        assert created.json()["limits"] == {"adapter_versions": 1, "adapter_rank": 2}
        await world.push("team-x")
        full = await world.call("POST", f"{path}/adapters/other/versions", files=world.last_files())
        told = check_error(full, 429, "quota_exceeded", "adapter_versions")
        assert told.startswith("This tenant has 1 versions and may have 1, retired ones included")
        assert full.headers["retry-after"] == "3600"
        changed = await world.call("PATCH", path, json={"limits": {"adapter_versions": None, "adapter_bytes": 1}})
        assert changed.json()["limits"] == {"adapter_rank": 2, "adapter_bytes": 1}
        again = await world.call("POST", f"{path}/adapters/other/versions", files=world.last_files())
        check_error(again, 429, "quota_exceeded", "adapter_bytes")
        check_error(
            await world.call("PATCH", path, json={"limits": {"x": 1}}), 400, "unsupported_parameter", "limits.x"
        )
        assert (await world.call("PATCH", path, json={"limits": None})).json()["limits"] == {}
        await world.push("team-x", "other")
        events = (await world.call("GET", "/api/v1/audit")).json()["data"]
        first = [event["details"] for event in events if event["action"] == "tenant.changed"][-1]
        assert first["before"] == {"limits": {"adapter_versions": 1, "adapter_rank": 2}}
        assert first["after"] == {"limits": {"adapter_bytes": 1, "adapter_rank": 2}}

    async def test_a_bad_field_is_named(self, world: GatewayWorld) -> None:
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({}, "invalid_request_error", "name"),
            ({"name": 5}, "invalid_request_error", "name"),
            ({"name": "Team-X"}, "invalid_name", "name"),
            ({"name": "team-x "}, "invalid_name", "name"),
            ({"name": "a" * 64}, "invalid_name", "name"),
            ({"name": "../x"}, "invalid_name", "name"),
            ({"name": "team-x", "nam": 1}, "unknown_parameter", "nam"),
            ({"name": "team-x", "limits": []}, "invalid_request_error", "limits"),
            (
                {"name": "team-x", "limits": {"requests_per_second": 5}},
                "unsupported_parameter",
                "limits.requests_per_second",
            ),
            ({"name": "team-x", "limits": {"adapter_rank": 0}}, "invalid_request_error", "limits.adapter_rank"),
            ({"name": "team-x", "limits": {"adapter_rank": True}}, "invalid_request_error", "limits.adapter_rank"),
            ({"name": "team-x", "limits": {"adapter_rank": 2**31}}, "invalid_request_error", "limits.adapter_rank"),
            ({"name": "team-x", "limits": {"adapter_bytes": 1.5}}, "invalid_request_error", "limits.adapter_bytes"),
            ({"name": "team-x", "bases": ["nope"]}, "invalid_request_error", "bases"),
            ({"name": "team-x", "display_name": ""}, "invalid_request_error", "display_name"),
            ({"name": "team-x", "display_name": "e\u0301"}, "invalid_request_error", "display_name"),
        ]
        for body, code, param in cases:
            check_error(await world.call("POST", TENANTS, json=body), 400, code, param)
            assert (await world.call("GET", TENANTS)).json()["data"] == [], body

    async def test_a_base_cannot_take_the_name_of_a_tenant_without_adapters(self, world: GatewayWorld) -> None:
        await world.call("POST", TENANTS, json={"name": "team-x"})
        base = {"name": "team-x", "fingerprint": "sha256:1", "modules": {"lm_head": [8, 4]}, "vocab_size": 8}
        check_error(await world.call("POST", "/api/v1/bases", json=base), 409, "name_reserved", "name")
        assert (await world.call("POST", "/api/v1/bases", json=base | {"name": "free"})).status_code == 201

    @pytest.mark.parametrize("name", [BASE, "platform", "other"])
    async def test_names_of_bases_and_of_the_platform_are_taken(self, world: GatewayWorld, name: str) -> None:
        check_error(await world.call("POST", TENANTS, json={"name": name}), 409, "name_reserved", "name")

    async def test_a_tenant_with_adapters_goes_only_by_cascade(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        key = await world.create_key("team-x")
        await world.push("team-x")
        told = check_error(await world.call("DELETE", f"{TENANTS}/team-x"), 409, "conflict")
        assert told.startswith("team-x has 1 adapter; delete it first")
        check_error(
            await world.call("DELETE", f"{TENANTS}/team-x?cascade=yes"), 400, "invalid_request_error", "cascade"
        )
        assert (await world.call("DELETE", f"{TENANTS}/team-x?cascade=true")).status_code == 204
        check_error(await world.call("GET", "/v1/models", key=key), 401, "invalid_api_key")
        listed = (await world.call("GET", "/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [BASE]

    async def test_lists_are_paged_newest_first(self, world: GatewayWorld) -> None:
        for i in range(5):
            await world.create_tenant(f"team-{i}")
        seen: list[str] = []
        cursor = ""
        while cursor is not None:
            page = (await world.call("GET", f"{TENANTS}?limit=2{cursor and '&cursor=' + cursor}")).json()
            assert len(page["data"]) <= 2
            seen += [tenant["name"] for tenant in page["data"]]
            cursor = page["next_cursor"]
        assert seen == [f"team-{i}" for i in reversed(range(5))]
        for query in ("limit=0", "limit=201", "limit=x", "limit=1&limit=2", f"limit={'9' * 5000}"):
            check_error(await world.call("GET", f"{TENANTS}?{query}"), 400, "invalid_request_error", "limit")
        check_error(await world.call("GET", f"{TENANTS}?cursor=!!"), 400, "invalid_request_error", "cursor")
        check_error(await world.call("GET", f"{TENANTS}?page=2"), 400, "unknown_parameter", "page")

    async def test_a_tenant_sees_itself_only(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        await world.create_tenant("team-y")
        key = await world.create_key("team-x")
        listed = (await world.call("GET", TENANTS, key=key)).json()["data"]
        assert [tenant["name"] for tenant in listed] == ["team-x"]


class TestKeys:
    """Create, list, revoke."""

    async def test_a_key_shows_its_text_once(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        created = (await world.call("POST", f"{TENANTS}/team-x/keys", json={"name": "app", "owner": "ada"})).json()
        text = created.pop("key")
        assert (created["scopes"], created["role"], created["owner"]) == (["infer"], "tenant", "ada")
        assert created["id"].startswith("key_")
        listed = (await world.call("GET", f"{TENANTS}/team-x/keys")).json()["data"]
        assert listed == [created]
        assert (await world.call("GET", "/v1/models", key=text)).status_code == 200
        assert (await world.call("DELETE", f"{TENANTS}/team-x/keys/{created['id']}")).status_code == 204
        check_error(await world.call("GET", "/v1/models", key=text), 401, "invalid_api_key")
        assert (await world.call("DELETE", f"{TENANTS}/team-x/keys/{created['id']}")).status_code == 204
        check_error(await world.call("DELETE", f"{TENANTS}/team-x/keys/key_nope"), 404, "not_found", "key_id")

    @pytest.mark.parametrize(
        ("body", "code", "param"),
        [
            ({}, "invalid_request_error", "name"),
            ({"name": "a", "scopes": ["root"]}, "invalid_request_error", "scopes"),
            ({"name": "a", "role": "root"}, "invalid_request_error", "role"),
            ({"name": "a", "expires_at": "2020-01-01T00:00:00Z"}, "invalid_request_error", "expires_at"),
            ({"name": "a", "expires_at": "2099-01-01T00:00:00"}, "invalid_request_error", "expires_at"),
            ({"name": "a", "expires": 1}, "unknown_parameter", "expires"),
        ],
    )
    async def test_a_bad_field_is_named(self, world: GatewayWorld, body: dict[str, Any], code: str, param: str) -> None:
        await world.create_tenant("team-x")
        check_error(await world.call("POST", f"{TENANTS}/team-x/keys", json=body), 400, code, param)

    async def test_a_key_of_one_tenant_cannot_be_revoked_through_another(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        await world.create_tenant("team-y")
        created = (await world.call("POST", f"{TENANTS}/team-y/keys", json={"name": "app"})).json()
        path = f"{TENANTS}/team-x/keys/{created['id']}"
        check_error(await world.call("DELETE", path), 404, "not_found", "key_id")


class TestModels:
    """/v1/models."""

    async def test_the_list_holds_what_the_key_may_call(self, world: GatewayWorld) -> None:
        for tenant in ("team-x", "team-y", "team-z"):
            await world.create_tenant(tenant, **({"bases": []} if tenant == "team-z" else {}))
        for tenant, adapter in (("team-x", "default"), ("team-x", "second"), ("team-y", "default")):
            await world.push(tenant, adapter)
        await world.push("team-x", "unborn", promote="never")
        keys = {tenant: await world.create_key(tenant) for tenant in ("team-x", "team-z")}
        listed = (await world.call("GET", "/v1/models", key=keys["team-x"])).json()
        assert listed["object"] == "list"
        shown = [(model["id"], model["root"], model["parent"], model["owned_by"]) for model in listed["data"]]
        assert shown == [
            (BASE, BASE, None, "platform"),
            ("team-x", "team-x/default@1", BASE, "team-x"),
            ("team-x/second", "team-x/second@1", BASE, "team-x"),
        ]
        assert set(listed["data"][0]) == {"id", "object", "created", "owned_by", "root", "parent"}
        assert (await world.call("GET", "/v1/models", key=keys["team-z"])).json()["data"] == []
        everything = (await world.call("GET", "/v1/models")).json()["data"]
        assert [model["id"] for model in everything] == [BASE, "team-x", "team-x/second", "team-y"]

    async def test_one_model_by_any_of_its_names(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        digest = (await world.push("team-x"))["digest"]
        encoded = ("team-x%2Fdefault", "team-x%2Fdefault%40live")
        for path in ("team-x", "team-x/default", "team-x/default@1", *encoded, f"team-x/default@{digest[:19]}"):
            response = await world.call("GET", f"/v1/models/{path}")
            assert (response.status_code, response.json()["root"]) == (200, "team-x/default@1"), response.text

    async def test_any_other_is_not_found(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        await world.push("team-x")
        for path in ("team-y", "team-x//default", "team-x/default/", "team-x/default%2F", "%ff", "TEAM-X"):
            check_error(await world.call("GET", f"/v1/models/{path}"), 404, "model_not_found", "model")


class TestReports:
    """Usage and audit."""

    async def test_usage_is_summed_for_whom_it_belongs_to(self, world: GatewayWorld) -> None:
        for tenant in ("team-x", "team-y"):
            await world.create_tenant(tenant)
            await self._use(world, tenant)
        key = await world.create_key("team-x", scopes=["usage:read"])
        own = (await world.call("GET", "/api/v1/usage?group_by=tenant,day", key=key)).json()
        assert [(row["tenant"], row["requests"], row["completion_tokens"]) for row in own["data"]] == [("team-x", 1, 5)]
        both = (await world.call("GET", "/api/v1/usage?group_by=tenant")).json()["data"]
        assert [row["tenant"] for row in both] == ["team-x", "team-y"]
        past = (await world.call("GET", "/api/v1/usage?to=2020-01-01&tenant=team-x")).json()["data"]
        assert past[0]["requests"] == 0
        for query, param in (
            ("group_by=color", "group_by"),
            ("from=yesterday", "from"),
            ("group_by=day,day", "group_by"),
        ):
            check_error(await world.call("GET", f"/api/v1/usage?{query}"), 400, "invalid_request_error", param)

    async def _use(self, world: GatewayWorld, name: str) -> None:
        tenant = world.gateway.directory.find_tenant(name)
        assert tenant is not None
        row = RequestRow(
            request_id=f"req_{name}",
            tenant_id=str(tenant.id),
            tenant=name,
            adapter_id=None,
            adapter=None,
            version=None,
            digest=None,
            base=BASE,
            key_id="key",
            route="/v1/completions",
            model=BASE,
            is_stream=False,
            client_request_id=None,
            tags=None,
            created_at=datetime.now(UTC),
            replica="http://e",
        )
        await world.gateway.ledger.settle(row, Settlement(outcome="ok", done=Done(completion_tokens=5)))

    async def test_the_trail_holds_the_acts_of_both_parts(self, world: GatewayWorld) -> None:
        await world.create_tenant("team-x")
        key = await world.create_key("team-x", scopes=["audit:read"], owner="ada")
        await world.push("team-x")
        events = (await world.call("GET", "/api/v1/audit", key=key)).json()["data"]
        actions = [event["action"] for event in events]
        assert {"tenant.created", "key.created"} < set(actions)
        assert any(action.startswith("adapter.") for action in actions)
        assert all(event["tenant"] == "team-x" for event in events)
        assert key not in json.dumps(events)
        assert [event["at"] for event in events] == sorted((event["at"] for event in events), reverse=True)
        assert all({"before", "after"} <= set(event["details"]) for event in events)

    async def test_the_trail_can_be_asked_for_who_what_which_and_when(self, world: GatewayWorld) -> None:
        for tenant in ("team-x", "team-y"):
            await world.create_tenant(tenant)
            await world.push(tenant, "style")
            await world.push(tenant, "style2")

        async def ask(**params: str) -> list[dict[str, Any]]:
            answer = await world.call("GET", "/api/v1/audit", params={"limit": "200", **params})
            assert answer.status_code == 200, answer.text
            found: list[dict[str, Any]] = answer.json()["data"]
            return found

        everything = await ask()
        one = next(event for event in everything if event["action"] == "adapter.version_created")
        for name in ("tenant", "actor", "action", "key_id", "request_id"):
            expected = [event for event in everything if event[name] == one[name]]
            assert await ask(**{name: one[name]}) == expected
        under = await ask(subject="team-x/style")
        assert {event["subject"] for event in under} >= {"team-x/style@1"}
        assert all(event["subject"].split("@")[0] == "team-x/style" for event in under)
        assert await ask(subject="team-x/styl%") == await ask(actor="nobody") == []
        middle = everything[len(everything) // 2]["at"]
        later, earlier = await ask(**{"from": middle}), await ask(to=middle)
        assert later + earlier == everything
        both = await ask(tenant="team-y", action="adapter.version_created")
        assert {event["tenant"] for event in both} == {"team-y"}
        first = (await world.call("GET", "/api/v1/audit", params={"limit": "1", "tenant": "team-y"})).json()
        rest = await ask(tenant="team-y", cursor=first["next_cursor"])
        assert first["data"] + rest == await ask(tenant="team-y")

    @pytest.mark.parametrize("text", ["", "a\0b", "x" * 301])
    async def test_the_trail_refuses_what_no_event_holds(self, world: GatewayWorld, text: str) -> None:
        answer = await world.call("GET", "/api/v1/audit", params={"actor": text})
        check_error(answer, 400, "invalid_request_error", "actor")

    @pytest.mark.parametrize(
        ("action", "names", "not_names"),
        [("key.rotate", "key.rotated", "alias.set"), ("promoted", "alias.set", "alias.promoted")],
    )
    async def test_an_act_that_there_is_not_is_refused_with_those_that_there_are(
        self, world: GatewayWorld, action: str, names: str, not_names: str
    ) -> None:
        answer = await world.call("GET", "/api/v1/audit", params={"action": action})
        check_error(answer, 400, "invalid_request_error", "action")
        message = answer.json()["error"]["message"]
        assert names in message
        assert not_names not in message


@pytest.mark.parametrize("param", ["from", "to"])
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_times_beyond_the_calendar_are_the_client_s_mistake(world: GatewayWorld, param: str, time: str) -> None:
    check_error(await world.call("GET", "/api/v1/usage", params={param: time}), 400, "invalid_request_error", param)
    await world.call("POST", TENANTS, json={"name": "team-x"})
    if time.startswith("9999"):
        body = {"name": "k", "scopes": ["infer"], "expires_at": time}
        answer = await world.call("POST", f"{TENANTS}/team-x/keys", json=body)
        check_error(answer, 400, "invalid_request_error", "expires_at")
