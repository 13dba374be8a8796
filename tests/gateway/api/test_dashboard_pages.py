"""The pages of the dashboard: each shows what the API would show to the same key, and runs nobody's text."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from dashboard_traffic import fill_events, fill_stats, fill_usage
from dashboard_world import Browser, find_unsafe, read_tags, read_text
from gateway_world import BASE, GatewayWorld, enclosed_world
from loraplex.dashboard.slot_table import find_thrash
from loraplex.db.tables import gateway_event, request, usage
from loraplex.fleet.view import FailedLoad, FleetView, Replica
from loraplex.keys.grant import SCOPES
from loraplex.quotas.quota import Charge, Quota, Subject
from loraplex.wire.stats import EngineStats, Quantiles

PAYLOAD = "<script>alert(1)</script><img src=x onerror=alert(1)>"
SHARED = ("/ui/", "/ui/traffic", "/ui/usage", "/ui/usage.csv", "/ui/limits", "/ui/audit")
OF_PLATFORM = ("/ui/slots", "/ui/limits/team-000")


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        for name in ("team-000", "team-001"):
            await found.create_tenant(name)
        yield found


@pytest.fixture
async def admin(world: GatewayWorld) -> Browser:
    browser = Browser(world)
    await browser.log_in()
    return browser


async def log_in(world: GatewayWorld, tenant: str, **fields: Any) -> Browser:
    browser = Browser(world)
    assert (await browser.log_in(await world.create_key(tenant, **fields))).status_code == 303
    return browser


async def read(browser: Browser, path: str) -> str:
    response = await browser.get(path)
    assert response.status_code == 200, (path, response.text)
    if not path.startswith("/ui/usage.csv"):
        assert find_unsafe(response.text) == []
    return response.text


def read_rows(page: str) -> list[list[str]]:
    """The cells of all rows of all tables' bodies."""
    rows = [
        row for body in re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL) for row in re.split(r"<tr[ >]", body)[1:]
    ]
    return [
        [
            " ".join(html.unescape(re.sub(r"<[^>]*>", " ", cell)).split())
            for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        ]
        for row in rows
    ]


async def insert(world: GatewayWorld, table: sa.Table, *rows: dict[str, Any]) -> None:
    async with world.gateway.database.write() as connection:
        await connection.execute(table.insert(), list(rows))


class TestWhoSeesWhat:
    """Scopes, roles and tenants, as the API has them."""

    async def test_a_tenant_sees_nothing_of_another(self, world: GatewayWorld) -> None:
        await fill_stats(world, 2, 6, num_pieces=30)
        await fill_usage(world, 2, 6)
        await fill_events(world, 10)
        browser = await log_in(world, "team-000", scopes=list(SCOPES))
        for path in SHARED:
            page = await read(browser, path)
            assert "team-001" not in page, path
            assert "adapter-001" not in page, path
        assert "adapter-000" in await read(browser, "/ui/traffic")
        assert "adapter-000" in await read(browser, "/ui/usage")
        for name in ("team-001", "team-zzz"):
            for path in (f"/ui/limits/{name}", f"/ui/usage?tenant={name}", f"/ui/audit?tenant={name}"):
                response = await browser.get(path)
                assert response.status_code == 404, path
                assert "There is no such tenant, or it is not yours." in read_text(response.text)

    async def test_a_tenant_hears_nothing_of_the_fleet(self, world: GatewayWorld) -> None:
        await fill_stats(world, 2, 6, num_pieces=30)
        world.gateway.fleet.view = FleetView((Replica(url="http://e", pool="main", base=BASE, problem=None),))
        browser = await log_in(world, "team-000", scopes=list(SCOPES))
        page = await read(browser, "/ui/")
        assert "KV cache" not in page
        assert "main-" not in page
        assert "Fleet" not in page
        assert (await browser.get("/ui/slots")).status_code == 403
        assert (await browser.get("/ui/traffic?by=replica")).status_code == 400

    async def test_the_menu_has_what_a_key_may_see_and_the_rest_is_refused(self, world: GatewayWorld) -> None:
        browser = await log_in(world, "team-000", scopes=["infer"])
        page = await read(browser, "/ui/")
        links = {attributes["href"] for tag, attributes in read_tags(page) if tag == "a"}
        assert "/ui/limits" in links
        assert links.isdisjoint({"/ui/traffic", "/ui/usage", "/ui/audit", "/ui/slots"})
        assert "usage:read" in read_text(page)
        for path in ("/ui/traffic", "/ui/usage", "/ui/usage.csv", "/ui/audit", "/ui/slots"):
            assert (await browser.get(path)).status_code == 403, path

    async def test_who_only_looks_sees_all_pages(self, world: GatewayWorld) -> None:
        await fill_stats(world, 2, 6, num_pieces=30)
        browser = await log_in(world, "team-000", role="admin_readonly")
        for path in (*SHARED, *OF_PLATFORM):
            await read(browser, path)
        assert "team-001" in await read(browser, "/ui/traffic")

    async def test_addresses_that_say_nonsense_are_refused_as_pages(self, admin: Browser) -> None:
        for path in (
            "/ui/?window=2h",
            "/ui/traffic?by=digest",
            "/ui/usage?group_by=digest",
            "/ui/usage?from=yesterday",
            "/ui/usage?price_read=-1",
            "/ui/audit?action=nothing",
            "/ui/audit?cursor=x",
            "/ui/audit?limit=0",
            "/ui/slots?x=1",
        ):
            response = await admin.get(path)
            assert response.status_code == 400, path
            assert response.headers["content-type"].startswith("text/html")
            assert find_unsafe(response.text) == []


class TestOverview:
    """The eight numbers, and who causes them."""

    async def test_it_has_the_eight_numbers_at_three_quantiles(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_stats(world, 2, 6, num_pieces=60)
        page = await read(admin, "/ui/?window=10m")
        (charts,) = [attributes["data-charts"] for _, attributes in read_tags(page) if "data-charts" in attributes]
        assert charts is not None
        found = msgspec.json.decode(charts)
        names = ["kv", "waiting", "running", "preemptions", "queue", "prefill", "ttft", "itl"]
        assert [tile["id"] for tile in found["tiles"]] == names
        for tile in found["tiles"]:
            assert all(len(line["values"]) == len(found["at"]) for line in tile["lines"])
            if tile["id"] != "preemptions":
                assert [line["label"] for line in tile["lines"]] == ["p50", "p95", "p99"]
                assert any(value for value in tile["lines"][0]["values"])
        assert read_rows(page)[0][0] == "team-000"

    async def test_a_tenant_has_eight_of_its_own(self, world: GatewayWorld) -> None:
        await fill_stats(world, 2, 6, num_pieces=30)
        browser = await log_in(world, "team-000", scopes=["usage:read"])
        tags = read_tags(await read(browser, "/ui/?window=1h"))
        tiles = [attributes["data-tile"] for _, attributes in tags if "data-tile" in attributes]
        assert tiles == ["requests", "tokens", "failed", "queue", "prefill", "ttft", "itl", "request"]

    async def test_before_anything_was_called_it_says_so(self, admin: Browser) -> None:
        text = read_text(await read(admin, "/ui/"))
        assert "Nothing was called in this window" in text
        assert "There is no engine" in text
        assert "The fleet is as it should be." not in text, "there is none"

    async def test_a_replica_is_shown_with_what_ails_it(self, world: GatewayWorld, admin: Browser) -> None:
        state = {"kv": {"num_blocks": 10, "num_free": 1}, "is_ready": True, "advice": [f"Raise this {PAYLOAD}"]}
        bad = Replica(url="http://b", pool="main", base=BASE, problem=f"it says {PAYLOAD}", state=state, num_waiting=7)
        world.gateway.fleet.view = FleetView((bad,))
        page = await read(admin, "/ui/")
        row = next(row for row in read_rows(page) if row[0] == bad.name)
        assert row[1].startswith("down it says <script>")
        assert "Raise this <script>" in row[1]
        assert (row[4], row[6]) == ("90.0 %", "7")

    async def test_four_hundred_adapters_are_one_page_of_traffic(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_stats(world, 40, 400, num_pieces=60)
        assert len(read_rows(await read(admin, "/ui/traffic?by=adapter&window=1h"))) == 400


class TestUsage:
    """Sums, costs, CSV."""

    async def test_sums_are_those_of_the_api(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_usage(world, 2, 6)
        told = (await world.call("GET", "/api/v1/usage?group_by=tenant,adapter")).json()["data"]
        rows = read_rows(await read(admin, "/ui/usage"))
        assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
            (one["tenant"], one["adapter"], f"{one['requests']:,}", f"{one['prompt_tokens']:,}") for one in told
        ]

    async def test_a_day_is_whole_at_both_ends(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_usage(world, 1, 1)
        (first, *_), today = await world.rows(usage), datetime.now(UTC).date().isoformat()
        for hour in ("00:00:00", "23:59:59"):
            at = datetime.fromisoformat(f"{today}T{hour}+00:00")
            await insert(world, usage, first | {"request_id": f"req_{hour}", "created_at": at, "adapter": "daily"})
        rows = read_rows(await read(admin, f"/ui/usage?from={today}&to={today}"))
        assert [row[2] for row in rows if row[1] == "daily"] == ["2"]

    async def test_prices_make_costs(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_usage(world, 1, 1)
        rows = await world.rows(usage)
        sums = {
            name: sum(row[name] for row in rows) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        }
        read_, cached, answered = sums.values()
        page = await read(admin, "/ui/usage?price_read=2&price_cached=0.5&price_answered=8")
        cost = ((read_ - cached) * 2 + cached * 0.5 + answered * 8) / 1_000_000
        assert read_rows(page)[0][-1] == f"{cost:.4f}"
        page = await read(admin, "/ui/usage?price_read=2")
        assert read_rows(page)[0][-1] == f"{read_ * 2 / 1_000_000:.4f}"

    async def test_a_spreadsheet_runs_no_text(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_usage(world, 1, 1)
        (first, *_) = await world.rows(usage)
        evil = '=HYPERLINK("http://evil")'
        await insert(world, usage, first | {"request_id": "req_evil", "adapter": evil})
        response = await admin.get("/ui/usage.csv")
        assert response.headers["content-type"].startswith("text/csv")
        assert response.headers["content-disposition"] == 'attachment; filename="usage.csv"'
        cells = [cell for row in csv.reader(io.StringIO(response.text)) for cell in row]
        assert f"'{evil}" in cells
        assert evil not in cells

    async def test_names_are_text(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_usage(world, 1, 1)
        (first, *_) = await world.rows(usage)
        await insert(world, usage, first | {"request_id": "req_evil", "adapter": PAYLOAD[:63], "tenant": "<b>x"})
        assert "<script>" in read_text(await read(admin, "/ui/usage"))


class TestPlayground:
    """What it begins with."""

    async def test_it_offers_the_default_adapter_first(self, world: GatewayWorld, admin: Browser) -> None:
        await world.push("team-000", "bias", promote="never")
        await world.push("team-000", "support")
        tenant = await log_in(world, "team-000", scopes=["infer"])
        for browser in (tenant, admin):
            page = await read(browser, "/ui/playground")
            (left,) = [a["value"] for tag, a in read_tags(page) if tag == "input" and a.get("id") == "model-left"]
            assert left == "team-000/support"


class TestAudit:
    """Filters and pages."""

    async def test_pages_follow_each_other_to_the_first_event(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_events(world, 120)
        path, seen = "/ui/audit?action=key.created&limit=10", []
        while path:
            page = await read(admin, path)
            seen += [row[2] for row in read_rows(page)]
            path = next((a["href"] or "" for tag, a in read_tags(page) if tag == "a" and a.get("rel") == "next"), "")
        made = [row["subject"] for row in await world.rows(gateway_event) if row["action"] == "key.created"]
        assert sorted(seen) == sorted(made)
        assert len(seen) > 20

    async def test_fields_that_are_left_empty_filter_nothing(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_events(world, 5)
        fields = "&".join(
            f"{name}=" for name in ("tenant", "action", "subject", "actor", "key_id", "request_id", "from")
        )
        assert len(read_rows(await read(admin, f"/ui/audit?{fields}&limit=200"))) > 5
        nobody = read_text(await read(admin, "/ui/audit?actor=nobody"))
        assert "No event fits" in nobody

    async def test_the_key_is_named_beside_the_actor_to_those_whose_it_is(
        self, world: GatewayWorld, admin: Browser
    ) -> None:
        scopes = ["adapters:read", "adapters:write", "audit:read"]
        text = await world.create_key("team-000", name="ci2", scopes=scopes)
        await world.push("team-000", "by-admin")
        path = "/api/v1/tenants/team-000/adapters/style/versions"
        assert (await world.call("POST", path, key=text, files=world.last_files())).status_code == 201
        created = "/ui/audit?action=adapter.version_created"
        (by_tenant, by_admin) = [row[4] for row in read_rows(await read(admin, created))]
        assert by_tenant == "bootstrap ci2 (team-000)"
        assert by_admin == "bootstrap bootstrap (platform)"
        tenant = Browser(world)
        await tenant.log_in(text)
        assert [row[3] for row in read_rows(await read(tenant, created))] == ["bootstrap ci2 (team-000)", "bootstrap"]
        assert "Key ci2 (team-000) bootstrap · tenant key" in read_text(await read(tenant, created))
        for address in ("/ui/adapters/team-000/style", "/ui/adapters/team-000/style/versions/1"):
            assert "ci2 (team-000)" in read_text(await read(tenant, address)).partition("tenant key")[2], address
        assert "platform" not in read_text(await read(tenant, "/ui/adapters/team-000/by-admin"))

    async def test_what_events_tell_is_text(self, world: GatewayWorld, admin: Browser) -> None:
        await fill_events(world, 1)
        row = next(row for row in await world.rows(gateway_event) if row["actor"] == "ada")
        evil = {"subject": PAYLOAD, "actor": PAYLOAD, "details": {"after": {"name": PAYLOAD}, "before": None}}
        await insert(world, gateway_event, row | {"id": row["id"].__class__(int=1), "public_id": "evt_evil"} | evil)
        page = await read(admin, "/ui/audit?limit=200")
        assert read_text(page).count("<script>alert(1)") == 3


class TestSlots:
    """Which adapter sits where."""

    async def test_slots_have_names_and_signs(self, world: GatewayWorld, admin: Browser) -> None:
        digest = (await world.push("team-000", "support"))["digest"]
        await world.gateway.names.ensure_fresh()
        slots = [
            {"slot": 0, "state": "ready", "digest": digest, "pins": 3, "keep": True},
            {"slot": 1, "state": "ready", "digest": "sha256:" + "b" * 64, "pins": 0, "keep": False},
            {"slot": 2, "state": "empty", "digest": None, "pins": 0, "keep": False},
        ]
        schedule = {"mode": "turns", "working_set": 9}
        replica = Replica(
            url="http://e",
            pool="main",
            base=BASE,
            problem=None,
            state={"slots": slots, "slot_schedule": schedule},
            num_slots=3,
            failed={
                "sha256:" + "c" * 64: FailedLoad(
                    reason=PAYLOAD, code="digest_mismatch", attempts=5, is_content=True, is_final=True
                )
            },
        )
        world.gateway.fleet.view = FleetView((replica,))
        page = await read(admin, "/ui/slots")
        first, second, third, failed = read_rows(page)
        assert first[1:3] == ["ready", "team-000/support@1"]
        assert first[4:] == ["3", "pinned"]
        assert second[2] == "no name means it"
        assert third[1:] == ["empty", "–", "–", "–", "–"]  # noqa: RUF001 - the dash of what is not there
        assert failed[2:] == ["given up", PAYLOAD]
        assert "Slot thrash: 9 adapters are wanted and there are 3 slots" in read_text(page)

    async def test_what_a_slot_holds_is_listed_there_alone_and_what_is_refused_is_not_called_ready(
        self, world: GatewayWorld, admin: Browser
    ) -> None:
        good, bad, apart = [(await world.push("team-000", name))["digest"] for name in ("good", "bad", "apart")]
        path = "/api/v1/tenants/team-000/adapters/bad/versions/1/quarantine"
        assert (await world.call("POST", path)).status_code == 200
        slots = [
            {"slot": index, "state": "ready", "digest": digest, "pins": 0, "keep": False}
            for index, digest in enumerate((good, bad))
        ]
        replica = Replica(
            url="http://e",
            pool="main",
            base=BASE,
            problem=None,
            state={"slots": slots},
            num_slots=2,
            in_memory=frozenset({good, bad, apart}),
        )
        world.gateway.fleet.view = FleetView((replica,))
        page = await read(admin, "/ui/slots")
        assert [row[1:3] for row in read_rows(page)] == [
            ["ready", "team-000/good@1"],
            ["quarantined", "team-000/bad@1"],
        ]
        assert "In memory, outside of slots (1): team-000/apart@1" in read_text(page)

    @pytest.mark.parametrize(
        ("state", "evictions", "is_thrash"),
        [
            ({"slot_schedule": {"mode": "turns", "working_set": 9}}, 0, True),
            ({"slot_schedule": {"mode": "resident", "working_set": 2}}, 16, False),
            ({}, 17, True),
            ({"slot_schedule": "nonsense"}, 0, False),
        ],
    )
    def test_thrash_is_more_wanted_than_there_is_room_or_slots_that_change_hands(
        self, state: dict[str, Any], evictions: int, is_thrash: bool
    ) -> None:
        nothing = Quantiles()
        engines = EngineStats(
            replicas=1,
            kv_usage=nothing,
            waiting=nothing,
            running=nothing,
            kv_usage_now=0.0,
            waiting_now=0,
            running_now=0,
            slots=8,
            slots_used=8,
            preemptions=0,
            prefix_queries=0,
            prefix_hits=0,
            loads=evictions,
            evictions=evictions,
        )
        assert (find_thrash(state, 8, engines) is not None) is is_thrash


class TestLimits:
    """Standing against limits."""

    async def test_tenants_nearest_to_a_limit_come_first(self, world: GatewayWorld, admin: Browser) -> None:
        await world.call("PATCH", "/api/v1/tenants/team-001", json={"limits": {"tokens_per_day": 1000}})
        await fill_usage(world, 2, 2, num_days=3)
        rows = read_rows(await read(admin, "/ui/limits"))
        assert [row[0] for row in rows] == ["team-001", "team-000"]
        (told,) = [
            one
            for one in (
                await world.call("GET", f"/api/v1/usage?group_by=tenant&from={datetime.now(UTC).date()}")
            ).json()["data"]
            if one["tenant"] == "team-001"
        ]
        assert rows[0][4] == f"{told['prompt_tokens'] + told['completion_tokens']:,} / 1,000"
        assert [row[0] for row in read_rows(await read(admin, "/ui/limits?q=000"))] == ["team-000"]
        assert "No tenant is called so" in read_text(await read(admin, "/ui/limits?q=zzz"))

    async def test_what_runs_and_what_was_asked_this_minute_counts(self, world: GatewayWorld) -> None:
        key = await world.create_key("team-000")
        key_id = (await world.call("GET", "/api/v1/tenants/team-000/keys")).json()["data"][0]["id"]
        tenant_id = world.gateway.directory.find_tenant_id("team-000")
        named = {"tenant_id": tenant_id, "tenant": "team-000", "adapter_id": None, "adapter": None, "version": None}
        now = datetime.now(UTC)
        row = named | {
            "digest": None,
            "base": BASE,
            "key_id": key_id,
            "route": "/v1/completions",
            "model": BASE,
            "is_stream": False,
            "client_request_id": None,
            "tags": None,
            "created_at": now,
            "replica": "http://e",
            "tokens_seen": 0,
            "settled_at": None,
            "gateway": None,
        }
        await insert(
            world, request, *(row | {"request_id": f"req_{n}", "settled_at": now if n else None} for n in range(3))
        )
        browser = Browser(world)
        await browser.log_in(key)
        page = await read(browser, "/ui/limits")
        assert read_rows(page)[0][1:4] == ["3", "0", "1"]
        assert "keys:write" in read_text(page)

    async def test_what_is_limited_is_shown_as_its_meter_counts(self, world: GatewayWorld, admin: Browser) -> None:
        await world.call("PATCH", "/api/v1/tenants/team-000", json={"limits": {"tokens_per_minute": 1000}})
        await world.create_key("team-000", limits={"concurrent_requests": 4})
        key_id = (await world.call("GET", "/api/v1/tenants/team-000/keys")).json()["data"][0]["id"]
        tenant_id = world.gateway.directory.find_tenant_id("team-000")
        charges = [
            Charge(Quota(Subject("key", key_id), "concurrent_requests", 4), 1),
            Charge(Quota(Subject("tenant", str(tenant_id)), "tokens_per_minute", 1000), 300),
        ]
        held = [await world.gateway.limiter.reserve(charges, f"lease-{number}") for number in range(2)]
        rows = read_rows(await read(admin, "/ui/limits/team-000"))
        assert rows[0][2] == "600 / 1,000"
        assert rows[1][0].endswith(key_id)
        assert rows[1][3] == "2 / 4"
        for one in held:
            await one.settle(50)
        rows = read_rows(await read(admin, "/ui/limits/team-000"))
        assert (rows[0][2], rows[1][3]) == ("100 / 1,000", "0 / 4")
