"""What no route may tell: that another tenant is there. And what read-only admins and strangers may not do: anything.

Every route of the application is asked, as its route table has it.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from gateway_world import ADMIN_KEY, BASE, GatewayWorld, check_error, enclosed_world
from loraplex.gateway import authentication
from loraplex.keys import secret
from loraplex.keys.grant import SCOPES

TENANTS = "/api/v1/tenants"
# what is on the wire between parts has a door of its own
INTERNAL = "/internal/"
OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
VARYING = {"x-request-id", "date"}


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        for name in ("team-x", "team-y"):
            await found.create_tenant(name)
        await found.push("team-y")
        yield found


def list_routes(app: Any) -> list[tuple[str, str]]:
    """Each method and path template of the application that clients can ask for."""
    while not isinstance(app, Litestar):
        app = app._app
    found = [(method, re.sub(r":\w+}", "}", route.path)) for route in app.routes for method in route.methods]
    return sorted(one for one in found if one[0] != "OPTIONS" and not one[1].startswith(INTERNAL))


async def fill(world: GatewayWorld) -> dict[str, str]:
    """Return values of path parameters that mean something of team-y."""
    keys = await world.call("POST", f"{TENANTS}/team-y/keys", json={"name": "theirs"})
    files = [{"name": "adapter_config.json", "size": 1, "sha256": "0" * 64, "part_size": 8 << 20, "part_sha256": []}]
    upload = await world.call("POST", f"{TENANTS}/team-y/adapters/default/uploads", json={"files": files})
    return {
        "tenant": "team-y",
        "adapter": "default",
        "number": "1",
        "name": "adapter_config.json",
        "alias": "live",
        "key_id": keys.json()["id"],
        "upload": upload.json().get("id", "upl_" + "a" * 26),
        "file": "adapter_config.json",
        "part": "1",
        "model": "team-y/default",
        "rest": "x",
        "escalation": "esc_" + "a" * 26,
    }


def build_path(template: str, values: dict[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda match: values[match[1]], template)


def show(response: httpx.Response) -> tuple[int, str, dict[str, str]]:
    """All that a client sees, but for what differs between any two answers."""
    headers = {name: value for name, value in response.headers.items() if name not in VARYING}
    return response.status_code, response.text, headers


async def test_no_route_tells_another_tenant_from_none(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=list(SCOPES))
    theirs = await fill(world)
    nobody = {**theirs, "tenant": "team-z"}
    routes = [route for route in list_routes(world.gateway.app) if "{tenant}" in route[1]]
    assert len(routes) >= 30
    for method, template in routes:
        foreign = await world.call(method, build_path(template, theirs), key=key, json={})
        missing = await world.call(method, build_path(template, nobody), key=key, json={})
        assert foreign.status_code == 404, (method, template)
        assert show(foreign) == show(missing), (method, template)


async def test_what_is_internal_has_no_door_for_keys_however_its_address_is_written(world: GatewayWorld) -> None:
    digest = (await world.call("GET", f"{TENANTS}/team-y/adapters/default/versions/1")).json()["digest"]
    team_key = await world.create_key("team-y", scopes=list(SCOPES))
    for start in ("/internal", "//internal", "/internal/", "///internal//", "/%69nternal"):
        is_plain = start == "/internal"
        for key in (ADMIN_KEY, team_key):
            names = await world.call("GET", f"http://gateway{start}/names", key=key)
            check_error(names, 404, "not_found")
            manifest = await world.call("GET", f"http://gateway{start}/artifacts/{digest}/manifest", key=key)
            check_error(manifest, *((401, "invalid_api_key") if is_plain else (404, "not_found")))
        manifest = await world.call("GET", f"http://gateway{start}/artifacts/{digest}/manifest", key="the-engine-key")
        assert manifest.status_code == (200 if is_plain else 404), start


async def test_no_name_of_a_model_tells_another_tenants_from_none(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=list(SCOPES))
    digest = (await world.call("GET", f"{TENANTS}/team-y/adapters/default/versions/1")).json()["digest"]
    for name in ("", "/default", "/default@1", "/default@2", "/default@live", f"/default@{digest}", "/other"):
        for path, field in (("chat/completions", "messages"), ("completions", "prompt"), ("tokenize", "prompt")):
            body = {field: "a" if field == "prompt" else [{"role": "user", "content": "a"}]}
            foreign, missing = [
                await world.call("POST", f"/v1/{path}", key=key, json={**body, "model": tenant + name})
                for tenant in ("team-y", "team-z")
            ]
            check_error(foreign, 404, "model_not_found", "model")
            assert foreign.text.replace("team-y", "team-z") == missing.text
        foreign, missing = [
            await world.call("GET", f"/v1/models/{tenant}{name}", key=key) for tenant in ("team-y", "team-z")
        ]
        assert foreign.status_code == 404
        assert foreign.text.replace("team-y", "team-z") == missing.text


async def test_no_filter_and_no_list_tells_of_other_tenants(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=list(SCOPES))
    theirs = await fill(world)
    for method, path in list_routes(world.gateway.app):
        if method != "GET" or "{" in path or path == "/openapi.json":
            continue
        listed = await world.call("GET", path, key=key)
        assert "team-y" not in listed.text, path
        for name, value in theirs.items():
            if name not in ("tenant", "adapter", "number", "name", "alias", "file", "part", "rest"):
                assert value not in listed.text, (path, name)
        foreign, missing = [
            await world.call("GET", path, key=key, params={"tenant": name}) for name in ("team-y", "team-z")
        ]
        assert show(foreign)[:2] == show(missing)[:2], path


async def test_a_key_of_another_tenant_is_no_key_of_ones_own(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=list(SCOPES))
    theirs = (await fill(world))["key_id"]
    nobodys = "key_" + "a" * 26
    for method, tail in (("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")):
        foreign, missing = [
            await world.call(method, f"{TENANTS}/team-x/keys/{key_id}{tail}", key=key, json={})
            for key_id in (theirs, nobodys)
        ]
        check_error(foreign, 404, "not_found", "key_id")
        assert foreign.text.replace(theirs, nobodys) == missing.text


async def test_a_team_does_not_hear_of_the_platforms_keys_that_are_kept_under_it(world: GatewayWorld) -> None:
    made = await world.call("POST", f"{TENANTS}/team-x/keys", json={"name": "auditor", "role": "admin_readonly"})
    key_id = made.json()["id"]
    key = await world.create_key("team-x", scopes=["audit:read", "keys:write"])
    rotated = await world.call("POST", f"{TENANTS}/team-x/keys/{key_id}/rotate", json={})
    await world.call("PATCH", f"{TENANTS}/team-x/keys/{rotated.json()['id']}", json={"priority": 3})
    await world.call("DELETE", f"{TENANTS}/team-x/keys/{key_id}")
    told = (await world.call("GET", "/api/v1/audit", key=key)).text
    assert key_id not in told
    assert rotated.json()["id"] not in told
    assert "auditor" not in told
    all_told = (await world.call("GET", f"/api/v1/audit?subject={key_id}")).json()["data"]
    assert [event["action"] for event in all_told] == ["key.revoked", "key.rotated", "key.created"]


async def test_a_tenants_key_scrapes_its_own_series_alone(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=["metrics:read"])
    for tenant in ("team-x", "team-y"):
        world.gateway.metrics.count_generation(tenant, "default", "ok", prompt_tokens=1, completion_tokens=2)
    own = (await world.call("GET", "/metrics", key=key)).text
    samples = [line for line in own.splitlines() if not line.startswith("#")]
    assert len(samples) == 3
    assert all('tenant="team-x"' in line for line in samples)
    everything = (await world.call("GET", "/metrics", key=await world.create_key("team-x", role="admin_readonly"))).text
    assert 'tenant="team-y"' in everything


async def test_a_read_only_admin_changes_nothing_anywhere(world: GatewayWorld) -> None:
    values = await fill(world)
    key = await world.create_key("team-x", role="admin_readonly")
    before = (await world.call("GET", "/api/v1/audit?limit=200")).json()["data"]
    for method, template in list_routes(world.gateway.app):
        response = await world.call(method, build_path(template, values), key=key, json={"model": BASE, "name": "a"})
        if method in ("GET", "HEAD"):
            # to list what one may call takes the right to call it, and who sees where parts go may send them
            is_right = template.startswith("/v1/models") or template.endswith("/uploads/{upload}")
            assert response.status_code != 403 or is_right, (method, template, response.text)
        elif template == "/api/v1/plan":
            # arithmetic, for which a body is all there is
            assert response.status_code == 400
        elif template.startswith(("/v1/responses", "/v1/embeddings")) or "{escalation}" in template:
            assert response.status_code in (403, 404)
        else:
            assert response.status_code == 403, (method, template, response.text)
            assert response.json()["error"]["code"] == "permission_denied"
    assert (await world.call("GET", "/api/v1/audit?limit=200")).json()["data"] == before


async def test_no_route_opens_without_a_key(world: GatewayWorld) -> None:
    values = await fill(world)
    for method, template in list_routes(world.gateway.app):
        if template not in OPEN:
            for key in (None, "lpx_" + "0" * 60, ADMIN_KEY[:-1]):
                response = await world.call(method, build_path(template, values), key=key, json={})
                check_error(response, 401, "invalid_api_key")


class TestTime:
    """How long an answer takes says no more than the answer."""

    def test_an_unknown_id_costs_what_a_known_one_costs(
        self, world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = secret.new_key_text()
        calls: list[str] = []
        hmac_secret = secret.hmac_secret

        def count(text: str, pepper: bytes) -> bytes:
            calls.append(text)
            return hmac_secret(text, pepper)

        monkeypatch.setattr(secret, "hmac_secret", count)
        verifier = authentication.Authenticator(world.gateway.directory, b"pepper")
        entry = authentication._NOBODY
        monkeypatch.setitem(world.gateway.directory._lookup_to_key, known[4:14], entry)
        costs = []
        for text in (known, secret.new_key_text()):
            calls.clear()
            with pytest.raises(authentication.AuthenticationError) as caught:
                verifier.authenticate(f"Bearer {text}", "req_1")
            costs.append((len(calls), str(caught.value)))
        assert costs[0] == costs[1]
        assert costs[0][0] == 1

    async def test_a_foreign_tenant_takes_as_long_as_none(self, world: GatewayWorld) -> None:
        key = await world.create_key("team-x", scopes=list(SCOPES))
        theirs = (await fill(world))["key_id"]
        pairs = (
            (f"{TENANTS}/team-y/adapters/default", f"{TENANTS}/team-z/adapters/default"),
            ("/v1/models/team-y/default@1", "/v1/models/team-z/default@1"),
            (f"{TENANTS}/team-x/keys/{theirs}", f"{TENANTS}/team-x/keys/key_{'a' * 26}"),
        )
        for foreign, missing in pairs:
            method = "PATCH" if "/keys/" in foreign else "GET"
            share = await compare(
                lambda path=foreign, how=method: world.call(how, path, key=key, json={}),
                lambda path=missing, how=method: world.call(how, path, key=key, json={}),
            )
            assert 0.3 < share < 0.7, (foreign, share)


async def compare(
    first: Callable[[], Awaitable[httpx.Response]], second: Callable[[], Awaitable[httpx.Response]], rounds: int = 120
) -> float:
    """Return in which share of all pairs of measurements the first took longer; 0.5 if they are alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(2 * rounds):
        which = (i + i // 2) % 2
        began = time.perf_counter()
        response = await (first, second)[which]()
        times[which].append(time.perf_counter() - began)
        assert response.status_code == 404
    return sum(a > b for a in times[0] for b in times[1]) / (len(times[0]) * len(times[1]))
