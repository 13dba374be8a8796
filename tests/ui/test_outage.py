"""The database goes away under an open dashboard, and comes back: what people see meanwhile, and how it ends."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from databases import PostgresServer
from gateway_world import ADMIN_KEY, GatewayWorld, running_world
from tcp_proxy import NONE, Fault, TcpProxy
from ui_world import WIDTHS, UiWorld, find_overflow, find_violations, serving

Shoot = Callable[[Any, str], None]
_SHOWN_MS = 20_000


class OutageWorld:
    """A gateway whose database lies behind a proxy."""

    def __init__(self, world: GatewayWorld, proxy: TcpProxy) -> None:
        self.world = world
        self._proxy = proxy

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.world.url

    async def take_away(self) -> None:
        """From now on the database answers nobody."""
        await self._proxy.suffer(Fault(is_gone=True))

    async def bring_back(self) -> None:
        """From now on it does."""
        await self._proxy.suffer(NONE)


Site = UiWorld[OutageWorld]


@asynccontextmanager
async def running_outage(url: str, folder: Path) -> AsyncIterator[OutageWorld]:
    """Yield a gateway with one engine, a tenant, an adapter, and a proxy before its database."""
    target = sa.make_url(url)
    proxy = TcpProxy(target.port or 5432)
    await proxy.start()
    try:
        near = target.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        async with running_world(near, folder, 1) as world:
            await world.create_tenant("team-x")
            await world.push("team-x", "support")
            yield OutageWorld(world, proxy)
            await proxy.suffer(NONE)
    finally:
        await proxy.stop()


@pytest.fixture(scope="module")
def outage(
    chromium: Any, postgres_server: PostgresServer, postgres_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A platform that runs on a database which can be taken away."""
    assert chromium
    name = postgres_server.create(postgres_template)
    folder = tmp_path_factory.mktemp("outage")
    try:
        with serving(lambda: running_outage(postgres_server.url(name), folder)) as found:
            yield found
    finally:
        postgres_server.drop(name)


@pytest.fixture
def tab(open_tab: Callable[..., Any], outage: Site) -> Any:
    return open_tab(outage.url, may_be_refused=True)


PAGES = (
    "",
    "traffic",
    "adapters",
    "adapters/team-x/support",
    "upload",
    "playground",
    "escalations",
    "escalations/open",
    "plan",
    "advice",
    "slots",
    "usage",
    "limits",
    "audit",
)
SENTENCE = "The database does not answer"


@pytest.fixture
def is_away(outage: Site) -> Iterator[None]:
    """The database comes back after the test, whatever that leaves."""
    yield
    outage.run(lambda world: world.bring_back())


@pytest.mark.usefixtures("is_away")
def test_a_page_that_cannot_be_read_keeps_its_frame_and_offers_to_try_again(
    tab: Any, outage: Site, shoot: Shoot
) -> None:
    outage.run(lambda world: world.take_away())
    for page in PAGES:
        answer = tab.goto(f"{outage.url}/ui/{page}")
        assert answer.status == 503, page
        main = tab.locator("main")
        main.get_by_role("heading", name="Not available now").wait_for()
        assert SENTENCE in main.inner_text()
        assert tab.get_by_role("link", name="Audit").is_visible()
        assert main.get_by_role("link", name="Try again").get_attribute("href") == f"/ui/{page}".rstrip("/")
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            shoot(tab, f"outage-page-{width}-{scheme}")
            assert find_overflow(tab) == []
            assert find_violations(tab) == []
    tab.goto(f"{outage.url}/ui/usage?group_by=tenant")
    outage.run(lambda world: world.bring_back())
    tab.get_by_role("link", name="Try again").click()
    tab.get_by_role("heading", name="Usage").wait_for()
    assert tab.url.endswith("/ui/usage?group_by=tenant")


@pytest.mark.usefixtures("is_away")
def test_a_part_that_cannot_be_read_says_so_in_its_place_and_is_asked_for_again(
    tab: Any, outage: Site, shoot: Shoot
) -> None:
    tab.goto(f"{outage.url}/ui/adapters")
    outage.run(lambda world: world.take_away())
    tab.get_by_label("Name").fill("nothing")
    notice = tab.locator("main").get_by_role("alert")
    notice.get_by_text(SENTENCE).wait_for(timeout=_SHOWN_MS)
    shoot(tab, "outage-search")
    assert find_violations(tab) == []
    outage.run(lambda world: world.bring_back())
    notice.get_by_role("button", name="Try again").click()
    tab.get_by_text("No adapter fits").wait_for(timeout=_SHOWN_MS)
    assert notice.count() == 0


@pytest.mark.usefixtures("is_away")
def test_an_act_that_cannot_be_done_says_so_in_its_dialog(tab: Any, outage: Site, shoot: Shoot) -> None:
    tab.goto(f"{outage.url}/ui/adapters/team-x/support")
    tab.get_by_role("button", name="Make default…").or_(tab.get_by_role("button", name="Weights…")).first.click()
    dialog = tab.get_by_role("dialog")
    send = dialog.locator("button[type=submit]")
    send.wait_for()
    outage.run(lambda world: world.take_away())
    send.click()
    dialog.get_by_role("alert").get_by_text(SENTENCE).wait_for(timeout=_SHOWN_MS)
    shoot(tab, "outage-act")
    assert send.is_enabled()


@pytest.mark.usefixtures("is_away")
def test_a_live_page_says_since_when_it_lags_and_follows_again_by_itself(tab: Any, outage: Site, shoot: Shoot) -> None:
    with tab.expect_response("**/ui/live/overview?window=1m"):
        tab.goto(f"{outage.url}/ui/?window=1m")
    note = tab.locator("[data-live-note]")
    outage.run(lambda world: world.take_away())
    told = re.compile(rf"{SENTENCE}.* What is shown is of [0-9:]+ UTC; the page follows again by itself")
    tab.locator("[data-live-note]", has_text=told).wait_for(timeout=_SHOWN_MS)
    shoot(tab, "outage-live")
    outage.run(lambda world: world.bring_back())
    note.wait_for(state="hidden", timeout=_SHOWN_MS)


@pytest.mark.usefixtures("is_away")
def test_a_live_page_whose_stream_is_refused_asks_for_another(tab: Any, outage: Site) -> None:
    """Browsers ask again by themselves where a stream broke off, and never where one was refused."""
    tab.route("**/ui/live/**", lambda route: route.fulfill(status=503, body="{}"))
    tab.goto(f"{outage.url}/ui/slots")
    note = tab.locator("[data-live-note]")
    note.get_by_text("Nothing new can be read now.").wait_for()
    tab.unroute("**/ui/live/**")
    note.wait_for(state="hidden", timeout=_SHOWN_MS)


@pytest.mark.usefixtures("is_away")
def test_a_login_that_cannot_be_judged_says_so_above_the_form(chromium: Any, outage: Site, shoot: Shoot) -> None:
    page = chromium.new_page()
    page.goto(f"{outage.url}/ui/login?next=/ui/audit")
    outage.run(lambda world: world.take_away())
    page.get_by_label("API key").fill(ADMIN_KEY)
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text(SENTENCE).wait_for(timeout=_SHOWN_MS)
    shoot(page, "outage-login")
    outage.run(lambda world: world.bring_back())
    page.get_by_label("API key").fill(ADMIN_KEY)
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/audit")
    page.close()
