"""Adapters in a real Chromium: finding one, moving what is live, uploading, comparing; by mouse and by keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboard_adapters import fill_adapters
from gateway_world import BASE, GatewayWorld
from support import write_adapter
from ui_world import WIDTHS, UiWorld, drop_path, find_cut, find_overflow, find_spilt, find_violations

HOSTILE = "<img src=x onerror=alert(1)>"
ADDRESS = "/ui/adapters/team-002/support"
_SHOWN_MS = 20_000
Site = UiWorld[GatewayWorld]
Shoot = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def adapters(site: Site) -> Site:
    """The site with hundreds of adapters, and one that was really uploaded, three times."""

    async def push(world: GatewayWorld) -> None:
        for _ in range(3):
            await world.push("team-002", "support", promote="always")
        await world.gateway.fleet.poll()

    site.run(lambda world: fill_adapters(world, 40, 400))
    site.run(push)
    return site


@pytest.fixture
def tab(open_tab: Callable[..., Any], adapters: Site) -> Any:
    """A page of an administrator, who is refused now and then."""
    return open_tab(adapters.url, may_be_refused=True)


def build_folder(site: Site, folder: Path, seed: int, **config: Any) -> Path:
    """A PEFT folder, with fields of its config changed."""
    write_adapter(folder, site.world.folder / BASE, rank=2, seed=seed)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_four_hundred_adapters_are_listed_and_searched_while_typing(tab: Any, adapters: Site) -> None:
    tab.goto(f"{adapters.url}/ui/adapters")
    assert tab.locator("#results tbody tr").count() > 400
    tab.get_by_label("Name").press_sequentially("adapter-12")
    tab.wait_for_url("**q=adapter-12*")
    tab.get_by_text("10 of").wait_for()
    assert tab.locator("#results tbody tr").count() == 10
    tab.get_by_label("State").select_option("quarantined")
    tab.get_by_text("1 of").wait_for()


def test_live_is_moved_and_rolled_back_after_a_question(tab: Any, adapters: Site) -> None:
    tab.goto(adapters.url + ADDRESS)
    row = tab.get_by_role("row").filter(has=tab.get_by_role("link", name="1", exact=True))
    row.get_by_role("button", name="Promote…").focus()
    tab.keyboard.press("Enter")
    dialog = tab.get_by_role("dialog")
    dialog.get_by_text("live leads to version 3 now").wait_for()
    tab.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    row.get_by_role("button", name="Promote…").click()
    dialog.get_by_role("button", name="Promote", exact=True).click()
    tab.get_by_text("team-002/support leads to version 1.").wait_for()
    tab.locator("dl.figures").get_by_text("Version 1").wait_for()
    tab.get_by_role("button", name="Roll back…").click()
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    tab.locator("dl.figures").get_by_text("Version 3").wait_for()


def test_weights_that_do_not_add_up_are_not_sent_and_a_faster_hand_is_named(
    tab: Any, adapters: Site, shoot: Shoot
) -> None:
    tab.goto(adapters.url + ADDRESS)
    tab.get_by_role("button", name="Weights…").click()
    dialog = tab.get_by_role("dialog")
    dialog.get_by_label("Version 3").fill("90")
    dialog.get_by_text("Sum: 90 %, but").wait_for()
    send = dialog.get_by_role("button", name="Set weights")
    assert send.is_disabled()
    dialog.get_by_label("Version 2").fill("10")

    async def be_faster(world: GatewayWorld) -> None:
        path = "/api/v1/tenants/team-002/adapters/support/aliases/live"
        etag = (await world.call("GET", path)).headers["etag"]
        body = {"targets": [{"version": 2, "weight": 100}]}
        answer = await world.call("PUT", path, json=body, headers={"if-match": etag})
        assert answer.status_code == 200, answer.text

    adapters.run(be_faster)
    send.click()
    dialog.get_by_text("bootstrap changed it at").wait_for()
    shoot(tab, "weights-of-a-faster-hand")
    assert dialog.get_by_label("Version 3").input_value() == "90"
    dialog.get_by_role("button", name="Set weights").click()
    tab.get_by_text("is divided as you said").wait_for()
    tab.locator("table").get_by_text("live 90 %").wait_for()


def test_a_refused_act_says_why_in_its_dialog(tab: Any, adapters: Site, shoot: Shoot) -> None:
    tab.goto(f"{adapters.url}/ui/adapters/team-003/adapter-003/versions/3")
    tab.get_by_role("button", name="Retire…").click()
    dialog = tab.get_by_role("dialog")
    dialog.get_by_text("The alias live leads to it, so this is refused").wait_for()
    dialog.get_by_role("button", name="Retire", exact=True).click()
    dialog.get_by_role("alert").get_by_text("targets version 3").wait_for()
    shoot(tab, "refused-act")
    assert find_violations(tab) == []


def test_a_good_folder_becomes_a_version(tab: Any, adapters: Site, tmp_path: Path, shoot: Shoot) -> None:
    tab.goto(f"{adapters.url}/ui/upload?adapter=team-002/fresh")
    folder = build_folder(adapters, tmp_path / "fresh", 501)
    (folder / "optimizer.pt").write_bytes(b"x")
    tab.set_input_files("#folder", str(folder))
    tab.get_by_text("1 other stays here").wait_for()
    shoot(tab, "upload-chosen")
    tab.get_by_role("button", name="Upload").click()
    tab.get_by_text("It is live: calls of team-002/fresh").wait_for(timeout=_SHOWN_MS)
    shoot(tab, "upload-taken")
    assert find_violations(tab) == []


def test_a_bad_folder_is_refused_with_each_reason_as_text(
    tab: Any, adapters: Site, tmp_path: Path, shoot: Shoot
) -> None:
    tab.goto(f"{adapters.url}/ui/upload?adapter=team-002/bad")
    folder = build_folder(adapters, tmp_path / "bad", 502, use_qalora=True, target_modules=["q_proj", HOSTILE])
    tab.set_input_files("#folder", str(folder))
    tab.get_by_role("button", name="Upload").click()
    tab.get_by_role("heading", name="Refused").wait_for(timeout=_SHOWN_MS)
    assert tab.get_by_text("field_unsupported").count() == 1
    assert tab.get_by_text(HOSTILE).count() >= 1
    assert find_violations(tab) == []
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        assert find_overflow(tab) == []
        shoot(tab, f"upload-refused-{width}")
    tab.emulate_media(color_scheme="dark")
    shoot(tab, f"upload-refused-{WIDTHS[-1]}-dark")


def test_a_dropped_folder_is_checked_only_if_so_asked(tab: Any, adapters: Site, tmp_path: Path) -> None:
    tab.goto(f"{adapters.url}/ui/upload?adapter=team-002/dropped")
    folder = build_folder(adapters, tmp_path / "dropped", 503)
    (folder / "trainer_state.json").write_text("{}")
    drop_path(tab, "#drop", folder)
    tab.get_by_text("2 files").wait_for()
    tab.get_by_text("1 other stays here").wait_for()
    tab.get_by_label("Check only").check()
    tab.get_by_role("button", name="Check", exact=True).click()
    tab.get_by_text("It would be taken as a version of team-002/dropped").wait_for(timeout=_SHOWN_MS)
    assert tab.goto(f"{adapters.url}/ui/adapters/team-002/dropped").status == 404


def test_a_dropped_file_that_is_no_adapter_says_what_is_wanted(tab: Any, adapters: Site, tmp_path: Path) -> None:
    tab.goto(f"{adapters.url}/ui/upload?adapter=team-002/dropped")
    (tmp_path / "notes.txt").write_text("nothing")
    drop_path(tab, "#drop", tmp_path / "notes.txt")
    tab.get_by_role("alert").get_by_text("This is no adapter's folder").wait_for()


def test_an_upload_on_its_way_can_be_cancelled(tab: Any, adapters: Site, tmp_path: Path) -> None:
    tab.goto(f"{adapters.url}/ui/upload?adapter=team-002/large")
    folder = build_folder(adapters, tmp_path / "large", 504)
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.write(b"\0" * (120 << 20))
    tab.set_input_files("#folder", str(folder))
    tab.get_by_role("button", name="Upload").click()
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_text("Cancelled; nothing was stored.").wait_for()
    assert tab.get_by_role("button", name="Upload").is_enabled()


def test_two_answers_stream_side_by_side_as_text(tab: Any, adapters: Site, shoot: Shoot) -> None:
    tab.goto(f"{adapters.url}/ui/playground?left=team-002/support@1&right=team-002/support@2")
    tab.get_by_label("Prompt").fill(f"say one two three {HOSTILE}")
    tab.get_by_role("button", name="Send").click()
    for side, number in (("left", 1), ("right", 2)):
        pane = tab.locator(f"[data-pane={side}]")
        pane.get_by_text(HOSTILE).wait_for()
        pane.get_by_text(f"team-002/support@{number} · sha256:").wait_for()
        pane.locator("[data-figure=finish]").get_by_text("stop").wait_for()
        assert pane.locator("[data-figure=first]").inner_text().endswith(" ms")
        assert float(pane.locator("[data-figure=rate]").inner_text()) > 0
        assert pane.locator("img").count() == 0
    assert find_violations(tab) == []
    shoot(tab, "playground-compared")


def test_an_answer_is_stopped_and_an_error_is_the_api_s(tab: Any, adapters: Site, shoot: Shoot) -> None:
    tab.goto(f"{adapters.url}/ui/playground?left=team-002/support&right=team-002/nobody")
    tab.get_by_label("Prompt").fill("say forever")
    tab.get_by_label("Prompt").press("Control+Enter")
    tab.locator("[data-pane=left]").get_by_text("forever").wait_for()
    tab.locator("[data-pane=right]").get_by_text("(model_not_found)").wait_for()
    shoot(tab, "playground-running")
    tab.get_by_role("button", name="Stop").click()
    tab.locator("[data-pane=left] [data-figure=finish]").get_by_text("you").wait_for()
    assert tab.get_by_role("button", name="Send").is_enabled()


PAGES = {
    "adapters": "/ui/adapters",
    "adapters-none": "/ui/adapters?q=nothing-is-called-so",
    "adapter": ADDRESS,
    "version": f"{ADDRESS}/versions/1",
    "adapter-quarantined": "/ui/adapters/team-005/adapter-005",
    "adapter-canary": "/ui/adapters/team-008/adapter-008",
    "upload": "/ui/upload",
    "playground": "/ui/playground",
    "escalations-none": "/ui/escalations",
    "plan": "/ui/plan",
    "plan-refused": "/ui/plan?model=nothing&gpu=h100",
    "advice": "/ui/advice",
    "not-found": "/ui/adapters/team-005/nothing",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_overlaps_or_shuts_anybody_out(tab: Any, adapters: Site, width: int, scheme: str, shoot: Shoot) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    for name, path in PAGES.items():
        tab.goto(adapters.url + path)
        shoot(tab, f"{name}-{width}-{scheme}")
        assert find_overflow(tab) == [], path
        assert width < WIDTHS[0] or find_cut(tab) == [], path
        assert find_spilt(tab) == [], path
        if width == WIDTHS[0] or scheme == "light":
            assert find_violations(tab) == [], path


def test_what_is_not_there_is_named_as_it_was_asked_for(tab: Any, adapters: Site) -> None:
    tab.goto(f"{adapters.url}/ui/adapters/team-005/nothing")
    tab.locator("main").get_by_text("team-005 has no adapter nothing.", exact=True).wait_for()
    tab.locator("main").get_by_role("link", name="Adapters").click()
    tab.get_by_role("heading", name="Adapters").wait_for()


def test_a_version_shows_what_its_engine_measured(tab: Any, adapters: Site) -> None:
    tab.goto(f"{adapters.url}{ADDRESS}/versions/1")
    section = tab.get_by_role("region", name="Parity", exact=True)
    section.get_by_text("100 positions of 4 golden prompts").wait_for()
    row = section.get_by_role("row").filter(has_text="Largest difference of a logit")
    assert row.locator("td").all_inner_texts() == ["1e-05", "1e-05", "0.001"]
