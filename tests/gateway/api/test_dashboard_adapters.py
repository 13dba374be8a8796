"""Pages of adapters: who sees and changes what, compare-and-set, uploads, and text of others that stays text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboard_world import ORIGIN, Browser, find_unsafe, read_tags, read_text
from gateway_world import BASE, GatewayWorld, enclosed_world
from support import write_adapter

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        await found.create_tenant("team-y")
        yield found


@pytest.fixture
async def admin(world: GatewayWorld) -> Browser:
    return await log_in(world)


async def log_in(world: GatewayWorld, tenant: str | None = None, **key: Any) -> Browser:
    browser = Browser(world)
    key = {"scopes": ["adapters:read", "adapters:write", "infer"]} | key
    await browser.log_in(*([] if tenant is None else [await world.create_key(tenant, **key)]))
    return browser


def read_form(html: str) -> dict[str, str]:
    """The fields of the question's form with their values."""
    return {
        str(attributes["name"]): attributes.get("value") or ""
        for tag, attributes in read_tags(html)
        if tag == "input" and "name" in attributes
    }


async def do(browser: Browser, address: str, act: str, query: str = "", **fields: str) -> httpx.Response:
    """Ask, and answer the question with yes."""
    asked = await browser.get(f"{address}/ask/{act}{query}")
    assert asked.status_code == 200, asked.text
    return await browser.post(f"{address}/do/{act}", read_form(asked.text) | fields, hx_request="true")


async def find_live(world: GatewayWorld, adapter: str = "style") -> list[dict[str, int]]:
    response = await world.call("GET", f"/api/v1/tenants/team-x/adapters/{adapter}/aliases/live")
    targets: list[dict[str, int]] = response.json()["targets"]
    return targets


class TestLists:
    """What is shown, and to whom."""

    async def test_a_tenant_sees_its_own_adapters_and_no_others(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-y", "secret")
        own = await log_in(world, "team-x")
        assert "secret" not in (await own.get("/ui/adapters")).text
        assert "style" in read_text((await own.get("/ui/adapters")).text)
        for path in ("team-y/secret", "team-y/secret/versions/1", "team-y/secret/ask/delete", "nobody/style"):
            assert (await own.get(f"/ui/adapters/{path}")).status_code == 404
        shown = read_text((await admin.get("/ui/adapters")).text)
        assert "secret" in shown
        assert "style" in shown

    async def test_search_state_and_base_choose_rows(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-y", "other", promote="never")
        for query, expected in (
            ("q=sty", ["style"]),
            ("q=team-y", ["other"]),
            ("q=nothing", []),
            ("state=ready", ["style"]),
            ("state=not%20live", ["other"]),
            (f"base={BASE}", ["other", "style"]),
            ("base=none", []),
        ):
            page = (await admin.get(f"/ui/adapters?{query}")).text
            links = {
                (attributes.get("href") or "").rpartition("/")[2]
                for tag, attributes in read_tags(page)
                if tag == "a" and (attributes.get("href") or "").startswith("/ui/adapters/")
            }
            assert sorted(links) == expected, query

    async def test_a_quarantined_newest_version_is_seen_in_the_list_and_on_the_overview(
        self, world: GatewayWorld, admin: Browser
    ) -> None:
        for name in ("alone", "beside"):
            await world.push("team-x", name)
        version = (await world.push("team-x", "beside", promote="never"))["version"]
        path = "/api/v1/tenants/team-x/adapters"
        assert (await world.call("DELETE", f"{path}/alone/aliases/live")).status_code == 204
        for name, number in (("alone", 1), ("beside", version)):
            answer = await world.call("POST", f"{path}/{name}/versions/{number}/quarantine")
            assert answer.status_code == 200, answer.text
        page = (await admin.get("/ui/adapters?state=quarantined")).text
        rows = [read_text(row) for row in page.split("<tr>") if "/ui/adapters/team-x/" in row]
        assert len(rows) == 2
        assert "quarantined" in rows[0]
        assert "ready" in rows[1]
        assert "quarantined 2" in rows[1]
        tenant = Browser(world)
        await tenant.log_in(await world.create_key("team-x", scopes=["adapters:read", "usage:read"]))
        text = read_text((await tenant.get("/ui/")).text)
        assert "Calls of team-x/alone@1, team-x/beside@2 are refused" in text
        views = (await world.call("GET", path)).json()["data"]
        found = {one["name"]: (one["live"], one["latest_state"]) for one in views}
        assert found == {"alone": (None, "quarantined"), "beside": (1, "quarantined")}

    async def test_each_page_keeps_the_policy_whatever_others_wrote(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-x", "style", promote="never")
        for path in ("", "/team-x/style", "/team-x/style/versions/1", "/team-x/style/ask/weigh?alias=live"):
            response = await admin.get(f"/ui/adapters{path}")
            assert response.status_code == 200, response.text
            assert find_unsafe(response.text) == []

    async def test_a_version_shows_its_report_and_gives_its_files(self, world: GatewayWorld, admin: Browser) -> None:
        version = await world.push("team-x", "style")
        page = await admin.get("/ui/adapters/team-x/style/versions/1")
        text = read_text(page.text)
        assert version["digest"] in text
        for check in version["report"]["checks"]:
            assert check["name"] in text
            assert check["message"] in text
        for _, (name, content) in world.last_files():
            file = await admin.get(f"/ui/adapters/team-x/style/versions/1/files/{name}")
            assert file.content == content

    async def test_a_key_without_the_scope_has_no_page_and_no_entry(self, world: GatewayWorld) -> None:
        await world.push("team-x", "style")
        browser = await log_in(world, "team-x", scopes=["infer"])
        assert "/ui/adapters" not in (await browser.get("/ui/")).text
        for path in ("/ui/adapters", "/ui/adapters/team-x/style", "/ui/upload"):
            assert (await browser.get(path)).status_code == 403


class TestActs:
    """Every act asks first, and is the API's."""

    async def test_promoting_and_rolling_back_move_live(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-x", "style", promote="never")
        address = "/ui/adapters/team-x/style"
        question = read_text((await admin.get(f"{address}/ask/promote?version=2")).text)
        assert "live leads to version 1 now" in question
        assert "go to version 2" in question
        done = await do(admin, address, "promote", "?version=2")
        assert (done.status_code, done.text) == (200, "")
        assert json.loads(done.headers["hx-trigger"])["toast"]["text"] == "team-x/style leads to version 2."
        assert await find_live(world) == [{"version": 2, "weight": 100}]
        assert "lead to version 1" in read_text((await admin.get(f"{address}/ask/roll-back?alias=live")).text)
        await do(admin, address, "roll-back", "?alias=live")
        assert await find_live(world) == [{"version": 1, "weight": 100}]

    async def test_whoever_saw_another_state_is_told_who_changed_it_and_asked_again(
        self, world: GatewayWorld, admin: Browser
    ) -> None:
        for promote in ("always", "never", "never"):
            await world.push("team-x", "style", promote=promote)
        address = "/ui/adapters/team-x/style"
        seen = read_form((await admin.get(f"{address}/ask/promote?version=2")).text)
        other = await log_in(world, "team-x", owner=f"grace {HOSTILE}"[:40])
        await do(other, address, "promote", "?version=3")
        late = await admin.post(f"{address}/do/promote", seen, hx_request="true")
        text = read_text(late.text)
        assert "grace" in text
        assert "Nothing was done" in text
        assert "live leads to version 3 now" in text
        assert find_unsafe(late.text) == []
        assert await find_live(world) == [{"version": 3, "weight": 100}]
        again = read_form(late.text)
        assert again["revision"] != seen["revision"]
        await admin.post(f"{address}/do/promote", again, hx_request="true")
        assert await find_live(world) == [{"version": 2, "weight": 100}]

    async def test_weights_make_a_canary_and_must_add_up(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-x", "style", promote="never")
        address = "/ui/adapters/team-x/style"
        given = {"weight-1": "90", "weight-2": "10"}
        await do(admin, address, "weigh", "?alias=live", **given)
        assert await find_live(world) == [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
        wrong = await do(admin, address, "weigh", "?alias=live", **{"weight-1": "90", "weight-2": "11"})
        assert wrong.status_code == 400
        assert "100" in wrong.json()["error"]["message"]
        made = await do(admin, address, "weigh", "?alias=canary", **{"weight-2": "100"})
        assert made.status_code == 200
        assert "canary" in read_text((await admin.get(address)).text)

    async def test_states_are_changed_by_those_who_may(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        await world.push("team-x", "style", promote="never")
        address, team = "/ui/adapters/team-x/style", await log_in(world, "team-x")
        assert "410" in read_text((await team.get(f"{address}/ask/retire?version=2")).text)
        for browser, act, state in (
            (team, "retire", "retired"),
            (team, "restore", "ready"),
            (admin, "quarantine", "quarantined"),
            (admin, "release", "ready"),
        ):
            done = await do(browser, address, act, "?version=2")
            assert done.status_code == 200, done.text
            version = await world.call("GET", "/api/v1/tenants/team-x/adapters/style/versions/2")
            assert version.json()["state"] == state
        assert (await do(team, address, "quarantine", "?version=2")).status_code == 403
        assert "quarantine" not in (await team.get(address)).text
        assert (await do(admin, address, "retire", "?version=1")).status_code == 409

    async def test_keys_that_may_only_read_change_nothing(self, world: GatewayWorld) -> None:
        await world.push("team-x", "style")
        address = "/ui/adapters/team-x/style"
        reader = await log_in(world, "team-x", scopes=["adapters:read"])
        assert "data-ask" not in (await reader.get(address)).text
        for act in ("promote", "weigh", "roll-back", "unset", "retire", "make-default", "delete"):
            fields = {"version": "1", "revision": "1", "alias": "live", "typed": "style", "weight-1": "100"}
            response = await reader.post(f"{address}/do/{act}", fields, hx_request="true")
            assert response.status_code == 403, act
        other = await log_in(world, "team-y")
        assert (await other.post(f"{address}/do/delete", {"typed": "style"})).status_code == 404

    async def test_deleting_takes_the_name_typed(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        address = "/ui/adapters/team-x/style"
        assert (await do(admin, address, "delete", typed="styl")).status_code == 400
        done = await do(admin, address, "delete", typed="style")
        assert json.loads(done.headers["hx-location"])["path"] == "/ui/adapters"
        assert (await admin.get(address)).status_code == 404

    async def test_acts_are_in_the_audit_under_the_session_s_key(self, world: GatewayWorld) -> None:
        await world.push("team-x", "style")
        await world.push("team-x", "style", promote="never")
        browser = await log_in(world, "team-x", owner="ada")
        await do(browser, "/ui/adapters/team-x/style", "promote", "?version=2")
        events = (await world.call("GET", "/api/v1/audit?actor=ada&action=alias.set")).json()["data"]
        assert [event["subject"] for event in events] == ["team-x/style@live"]

    async def test_what_other_sites_send_changes_nothing(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-x", "style")
        address = "/ui/adapters/team-x/style/do/delete"
        assert (await admin.post(address, {"typed": "style"}, origin="https://evil.example")).status_code == 403
        assert (await admin.get("/ui/adapters/team-x/style")).status_code == 200


class TestUploads:
    """Folders that are taken and folders that are not."""

    async def send(
        self, world: GatewayWorld, browser: Browser, files: Any, query: str = "", tenant: str = "team-x"
    ) -> httpx.Response:
        assert browser.cookie is not None
        headers = {"cookie": browser.cookie, "origin": ORIGIN, "host": "gateway", "accept": "application/json"}
        return await world.http.post(f"/ui/upload/{tenant}/style{query}", files=files, headers=headers)

    def build(self, world: GatewayWorld, **config: Any) -> list[Any]:
        source = write_adapter(world.folder / "one", world.folder / BASE, rank=2, seed=9)
        if config:
            path = source / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]

    async def test_a_good_one_becomes_a_version_and_says_so(self, world: GatewayWorld) -> None:
        browser = await log_in(world, "team-x")
        response = await self.send(world, browser, self.build(world))
        assert response.status_code == 200, response.text
        assert "Version 1 of team-x/style" in read_text(response.text)
        assert await find_live(world) == [{"version": 1, "weight": 100}]
        again = await self.send(world, browser, self.build(world))
        assert "are version 1 already" in read_text(again.text)

    async def test_a_bad_one_is_refused_with_its_report(self, world: GatewayWorld, admin: Browser) -> None:
        files = self.build(world, target_modules=[HOSTILE], base_model_name_or_path=HOSTILE)
        response = await self.send(world, admin, files)
        text = read_text(response.text)
        assert response.status_code == 422
        assert "Refused" in text
        assert "base_mismatch" in text
        assert find_unsafe(response.text) == []
        assert (await admin.get("/ui/adapters/team-x/style")).status_code == 404

    async def test_a_refusal_says_once_what_is_wrong_in_all_layers_and_its_cause_first(
        self, world: GatewayWorld, admin: Browser
    ) -> None:
        response = await self.send(world, admin, self.build(world, target_modules=["q_proj", "gate_up_proj"]))
        text = read_text(response.text)
        cause = text.index("The base has no module gate_up_proj")
        assert cause < text.index("v_proj in layers 0-1 (4 tensors)")
        assert text.count("unmatched_tensors") == 1
        assert "1 check failed." in text

    async def test_checking_only_stores_nothing(self, world: GatewayWorld, admin: Browser) -> None:
        response = await self.send(world, admin, self.build(world), "?dry_run=true")
        assert response.status_code == 200, response.text
        assert "Nothing was stored" in read_text(response.text)
        assert (await admin.get("/ui/adapters/team-x/style")).status_code == 404

    async def test_limits_and_permissions_are_the_api_s(self, world: GatewayWorld, admin: Browser) -> None:
        other = await log_in(world, "team-y")
        assert (await self.send(world, other, self.build(world))).status_code == 404
        reader = await log_in(world, "team-x", scopes=["adapters:read"])
        assert (await self.send(world, reader, self.build(world))).status_code == 403
        assert (await self.send(world, other, self.build(world), f"?base={BASE}", "team-y")).status_code == 403
        assert (await self.send(world, admin, self.build(world), "?promot=always")).status_code == 400
        await world.call("PATCH", "/api/v1/tenants/team-x", json={"limits": {"adapter_bytes": 10}})
        refused = await self.send(world, admin, self.build(world))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")

    async def test_the_form_offers_what_the_key_may(self, world: GatewayWorld, admin: Browser) -> None:
        page = await admin.get("/ui/upload?adapter=team-x/style")
        assert 'value="team-x"' in page.text
        assert 'value="style"' in page.text
        assert find_unsafe(page.text) == []
        team = (await (await log_in(world, "team-x")).get("/ui/upload")).text
        assert "team-y" not in team
        assert 'id="tenant"' not in team
        assert 'id="base"' not in team
