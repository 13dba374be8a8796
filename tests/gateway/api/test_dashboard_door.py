"""The way into the dashboard: sessions, their ends, what other sites may make a browser do, and what pages may run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from dashboard_world import Browser, find_unsafe, read_text
from gateway_world import ADMIN_KEY, GatewayWorld, check_error, enclosed_world
from loraplex.dashboard.asset import Assets
from loraplex.dashboard.session import Sessions
from loraplex.db.tables import dashboard_session
from loraplex.errors import UnavailableError
from loraplex.settings import read_networks

POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        yield found


@pytest.fixture
def browser(world: GatewayWorld) -> Browser:
    return Browser(world)


async def is_inside(browser: Browser) -> bool:
    response = await browser.get("/ui/")
    if response.status_code == 303:
        assert response.headers["location"].startswith("/ui/login")
        return False
    assert response.status_code == 200, response.text
    return True


async def change_session(world: GatewayWorld, **values: object) -> None:
    async with world.gateway.database.write() as connection:
        await connection.execute(sa.update(dashboard_session).values(values))


class TestLogin:
    """The form, its cookie, its limits."""

    async def test_a_key_of_a_tenant_or_of_the_platform_opens_the_dashboard(self, world: GatewayWorld) -> None:
        for key, name in ((ADMIN_KEY, "Platform"), (await world.create_key("team-x"), "team-x")):
            browser = Browser(world)
            assert not await is_inside(browser)
            response = await browser.log_in(key)
            assert (response.status_code, response.headers["location"]) == (303, "/ui/")
            page = await browser.get("/ui/")
            assert page.status_code == 200
            assert name in read_text(page.text)
            assert key not in page.text

    async def test_the_cookie_is_bound_to_the_host_and_to_tls(self, world: GatewayWorld, browser: Browser) -> None:
        cookie = (await browser.log_in()).headers["set-cookie"]
        name, _, rest = cookie.partition("=")
        assert name == "__Host-loraplex"
        assert rest.split("; ")[1:] == ["Max-Age=28800", "Path=/", "HttpOnly", "SameSite=Strict", "Secure"]

    @pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"])
    async def test_on_loopback_it_needs_no_tls(self, browser: Browser, host: str) -> None:
        response = await browser.post("/ui/login", {"key": ADMIN_KEY}, host=host, origin=f"http://{host}")
        cookie = response.headers["set-cookie"]
        assert cookie.startswith("loraplex=")
        assert "Secure" not in cookie
        assert "HttpOnly" in cookie
        assert (await browser.get("/ui/", host=host)).status_code == 200
        # and opens nothing where it would have to be secure
        assert (await browser.get("/ui/", host="gateway")).status_code == 303

    async def test_on_loopback_it_is_secure_where_a_trusted_proxy_has_tls(
        self, database_url: str, tmp_path: Path
    ) -> None:
        async with enclosed_world(database_url, tmp_path, trusted_proxies=read_networks("127.0.0.1")) as world:
            browser, host = Browser(world), "localhost:8443"
            called = {"host": host, "origin": f"https://{host}", "x_forwarded_proto": "https"}
            cookie = (await browser.post("/ui/login", {"key": ADMIN_KEY}, **called)).headers["set-cookie"]
            assert cookie.startswith("__Host-loraplex=")
            assert cookie.endswith("; Secure")
            assert (await browser.get("/ui/", host=host, x_forwarded_proto="https")).status_code == 200
            assert (await browser.get("/ui/", host=host)).status_code == 303

    @pytest.mark.parametrize("scheme", ["http", "https"])
    async def test_nobody_else_says_whether_there_is_tls(self, browser: Browser, scheme: str) -> None:
        host = "localhost:8080"
        called = {"host": host, "origin": f"http://{host}", "x_forwarded_proto": scheme}
        cookie = (await browser.post("/ui/login", {"key": ADMIN_KEY}, **called)).headers["set-cookie"]
        assert cookie.startswith("loraplex=")
        assert (
            "Secure"
            in (await browser.post("/ui/login", {"key": ADMIN_KEY}, x_forwarded_proto=scheme)).headers["set-cookie"]
        )

    async def test_what_is_stored_is_no_token(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in()
        (row,) = await world.rows(dashboard_session)
        assert browser.cookie is not None
        assert browser.cookie.split("=", 1)[1].encode() not in row["token_hash"]
        assert row["expires_at"] - row["created_at"] == timedelta(hours=8)

    async def test_a_key_that_opens_nothing_opens_no_session(self, world: GatewayWorld, browser: Browser) -> None:
        for key in ("", "lpx_" + "0" * 59, ADMIN_KEY + "x"):
            response = await browser.log_in(key)
            assert response.status_code == 401
            assert "set-cookie" not in response.headers
            if key:
                assert key not in response.text
        assert await world.rows(dashboard_session) == []

    async def test_five_wrong_keys_a_minute_are_enough(self, browser: Browser) -> None:
        for number in range(5):
            assert (await browser.log_in(f"wrong-{number}")).status_code == 401
        response = await browser.log_in()
        assert response.status_code == 429
        assert 0 < int(response.headers["retry-after"]) <= 60
        assert "Too many tries" in read_text(response.text)

    async def test_right_keys_are_no_tries(self, browser: Browser) -> None:
        for _ in range(7):
            assert (await browser.log_in()).status_code == 303

    async def test_it_leads_to_the_page_that_was_asked_for_and_nowhere_else(self, browser: Browser) -> None:
        asked = await browser.get("/ui/audit?action=key.created")
        assert asked.headers["location"] == "/ui/login?next=/ui/audit%3Faction%3Dkey.created"
        form = await browser.get(asked.headers["location"])
        assert 'value="/ui/audit?action=key.created"' in form.text
        found = await browser.log_in(next="/ui/audit?action=key.created")
        assert found.headers["location"] == "/ui/audit?action=key.created"
        for elsewhere in (
            "https://evil.example/",
            "//evil.example/ui/",
            "/ui//evil.example",
            "/\\evil",
            "/ui/\r\nx: y",
        ):
            assert (await browser.log_in(next=elsewhere)).headers["location"] == "/ui/"

    async def test_logins_and_logouts_are_in_the_audit(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in(await world.create_key("team-x", owner="ada"))
        await browser.post("/ui/logout")
        events = (await world.call("GET", "/api/v1/audit?actor=ada")).json()["data"]
        assert [event["action"] for event in events] == ["session.closed", "session.opened"]
        assert {event["tenant"] for event in events} == {"team-x"}


class TestEnds:
    """When a session is over."""

    async def test_logging_out_ends_it(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in()
        kept = browser.cookie
        response = await browser.post("/ui/logout")
        assert (response.status_code, response.headers["location"]) == (303, "/ui/login")
        browser.cookie = kept
        assert not await is_inside(browser)
        assert await world.rows(dashboard_session) == []

    async def test_eight_hours_or_half_an_hour_without_a_page_end_it(self, world: GatewayWorld) -> None:
        now = datetime.now(UTC)
        for values in (
            {"seen_at": now - timedelta(minutes=30, seconds=1)},
            {"expires_at": now - timedelta(seconds=1), "created_at": now - timedelta(hours=8)},
        ):
            browser = Browser(world)
            await browser.log_in()
            await change_session(world, **values)
            assert not await is_inside(browser)

    async def test_a_page_begins_its_half_hour_anew(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in()
        await change_session(world, seen_at=datetime.now(UTC) - timedelta(minutes=29))
        assert await is_inside(browser)
        (row,) = await world.rows(dashboard_session)
        assert datetime.now(UTC) - row["seen_at"] < timedelta(minutes=1)

    async def test_it_ends_with_its_key(self, world: GatewayWorld, browser: Browser) -> None:
        made = (await world.call("POST", "/api/v1/tenants/team-x/keys", json={"name": "a"})).json()
        await browser.log_in(made["key"])
        assert await is_inside(browser)
        await world.call("DELETE", f"/api/v1/tenants/team-x/keys/{made['id']}")
        assert not await is_inside(browser)
        assert await world.rows(dashboard_session) == []

    async def test_it_ends_with_its_tenant(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in(await world.create_key("team-x"))
        await world.call("PATCH", "/api/v1/tenants/team-x", json={"state": "suspended"})
        assert not await is_inside(browser)
        await world.call("PATCH", "/api/v1/tenants/team-x", json={"state": "active"})
        assert not await is_inside(browser)

    async def test_it_ends_with_the_role_that_it_was_opened_with(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in(await world.create_key("team-x", role="admin_readonly"))
        await change_session(world, role="admin")
        assert not await is_inside(browser)

    async def test_old_sessions_are_forgotten(self, world: GatewayWorld) -> None:
        await Browser(world).log_in()
        await change_session(world, seen_at=datetime.now(UTC) - timedelta(hours=1))
        await Browser(world).log_in()
        assert len(await world.rows(dashboard_session)) == 1
        for _ in range(22):
            await Browser(world).log_in()
        assert len(await world.rows(dashboard_session)) == 20


class TestBorders:
    """A cookie opens pages, a bearer key the API, and neither the other."""

    async def test_a_session_opens_nothing_of_the_api(self, world: GatewayWorld, browser: Browser) -> None:
        await browser.log_in()
        for path in ("/api/v1/tenants", "/v1/models", "/api/v1/fleet"):
            check_error(await browser.get(path), 401, "invalid_api_key")

    async def test_a_bearer_key_opens_no_page(self, browser: Browser) -> None:
        response = await browser.get("/ui/", authorization=f"Bearer {ADMIN_KEY}")
        assert response.status_code == 303
        response = await browser.get(
            "/ui/live/overview", authorization=f"Bearer {ADMIN_KEY}", accept="text/event-stream"
        )
        assert response.status_code == 401

    @pytest.mark.parametrize(
        "origin", ["", "null", "https://evil.example", "http://gateway.evil.example", "http://gateway:81"]
    )
    async def test_other_sites_change_nothing(self, world: GatewayWorld, browser: Browser, origin: str) -> None:
        await browser.log_in()
        assert (await browser.post("/ui/logout", origin=origin)).status_code == 403
        assert await is_inside(browser)
        assert (await Browser(world).post("/ui/login", {"key": ADMIN_KEY}, origin=origin)).status_code == 403
        assert len(await world.rows(dashboard_session)) == 1

    async def test_a_link_of_another_site_gets_the_cookie_by_a_step_of_our_own(self, browser: Browser) -> None:
        followed = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
        response = await browser.get("/ui/audit?actor=a%22b", **followed)
        assert response.status_code == 200
        assert 'content="0; url=/ui/audit?actor=a%22b"' in response.text
        response = await browser.get("/ui/audit", sec_fetch_site="same-origin", sec_fetch_mode="navigate")
        assert response.status_code == 303

    async def test_home_leads_in(self, browser: Browser) -> None:
        response = await browser.get("/")
        assert (response.status_code, response.headers["location"]) == (302, "/ui/")


class TestPages:
    """What every answer has, and what no page does."""

    async def test_every_answer_has_the_policy(self, browser: Browser) -> None:
        await browser.log_in()
        style = Assets().find_url("app.css")
        for path in ("/", "/ui/", "/ui/login", "/ui/nothing", style, "/ui/static/x/nothing.js"):
            response = await browser.get(path)
            assert response.headers["content-security-policy"] == POLICY, path
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["x-request-id"].startswith("req_")
            assert find_unsafe(response.text) == [] or "/static/" in path
            assert response.headers.get("cache-control") == "no-store" or path in ("/", style) or "/static/" in path
        assert (await Browser(browser._world).get("/ui/")).headers["content-security-policy"] == POLICY

    async def test_files_are_kept_for_a_year_by_the_hash_of_their_content(self, browser: Browser) -> None:
        assets = Assets()
        response = await browser.get(assets.find_url("app.css"))
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert response.headers["content-type"] == "text/css; charset=utf-8"
        other = await browser.get("/ui/static/000000000000/app.css")
        assert other.headers["cache-control"] == "no-cache"
        assert other.content == response.content
        for name in ("..%2fpage.py", "nothing.css"):
            assert (await browser.get(f"/ui/static/{assets.stamp}/{name}")).status_code == 404

    async def test_scripts_of_all_pages_together_are_small(self) -> None:
        folder = Path(__file__).parents[3] / "platform/loraplex/dashboard/static"
        assert sum(file.stat().st_size for file in folder.glob("*.js")) < 150_000

    async def test_errors_are_pages_for_people_and_json_for_scripts(self, browser: Browser) -> None:
        await browser.log_in()
        response = await browser.get("/ui/nothing")
        assert response.status_code == 404
        assert "There is no such page" in read_text(response.text)
        assert response.headers["x-request-id"] in response.text
        check_error(await browser.get("/ui/nothing", hx_request="true"), 404, "not_found")
        assert (await browser.post("/ui/")).status_code == 405

    async def test_without_a_database_who_was_inside_keeps_the_menu_and_nobody_gets_in(
        self, browser: Browser, world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await browser.log_in()
        await browser.get("/ui/")
        stranger = Browser(world)
        stranger.cookie = "__Host-loraplex=" + "x" * 43

        async def refuse(*_: object, **__: object) -> None:
            raise UnavailableError("The database does not answer; try again shortly.")

        monkeypatch.setattr(Sessions, "find", refuse)
        monkeypatch.setattr(Sessions, "open", refuse)
        page = await browser.get("/ui/audit?actor=ada")
        assert page.status_code == 503
        assert "The database does not answer; try again shortly." in read_text(page.text)
        assert 'href="/ui/audit?actor=ada">Try again' in page.text
        assert 'href="/ui/limits"' in page.text
        assert "session.opened" not in page.text
        bare = await stranger.get("/ui/audit")
        assert (bare.status_code, 'href="/ui/limits"' in bare.text) == (503, False)
        assert 'href="/ui/audit">Try again' in bare.text
        login = await Browser(world).log_in()
        assert (login.status_code, "set-cookie" in login.headers) == (503, False)
        assert 'name="key"' in login.text
        assert "The database does not answer" in read_text(login.text)

    async def test_names_are_shown_as_text(self, world: GatewayWorld, browser: Browser) -> None:
        payload = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
        await browser.log_in(await world.create_key("team-x", owner=payload))
        page = (await browser.get("/ui/")).text
        assert find_unsafe(page) == []
        assert " ".join(payload.split()) in read_text(page)
        assert "&lt;script&gt;alert(1)" in page
