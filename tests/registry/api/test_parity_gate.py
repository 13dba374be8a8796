"""The parity gate over HTTP: who waits, what each verdict leads to, and what a restart or a deletion changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from gateway_world import until
from loraplex_registry.app import create_registry
from loraplex_registry.db.model import EventRow
from loraplex_registry.parity import gate as gate_module
from loraplex_registry.parity.judge import NoVerdictError
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.settings import RegistrySettings
from registry_world import BASE, ThreadChecker, World

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"
GOOD = ParityResult(
    dtype="float32",
    num_prompts=4,
    num_positions=100,
    max_logit_difference=1e-5,
    max_kl=1e-9,
    base_logit_difference=1e-5,
    base_kl=1e-9,
    logit_limit=1e-3,
    kl_limit=1e-5,
)


class ScriptedJudge:
    """An engine that answers when the test lets it."""

    def __init__(self) -> None:
        self.is_there = True
        self.weights = ""
        self.answer: ParityResult | Exception | None = GOOD
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[str] = []
        self.running: set[str] = set()
        self.most_running = 0

    def has_engine(self, base: str) -> bool:
        return self.is_there

    async def measure(self, base: str, digest: str, rank: int, weights: str | None = None) -> ParityResult | None:
        if not self.is_there or weights not in (None, self.weights):
            return None
        self.asked.append(digest)
        self.running.add(digest)
        self.most_running = max(self.most_running, len(self.running))
        try:
            await self.may_answer.wait()
        finally:
            self.running.discard(digest)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer and msgspec.structs.replace(self.answer, weights_digest=self.weights)


@pytest.fixture
def mode() -> str:
    return "when_available"


@pytest.fixture
def registry_settings(registry_settings: RegistrySettings, mode: str) -> RegistrySettings:
    return replace(registry_settings, parity_gate=mode, parity_patience_s=0.3)


@pytest.fixture
def verdicts() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def judge(world: World, verdicts: list[str], monkeypatch: pytest.MonkeyPatch) -> ScriptedJudge:
    monkeypatch.setattr(gate_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(gate_module, "_LONGEST_RETRY_S", 0.05)
    scripted = ScriptedJudge()
    world.registry.know_parity(scripted, verdicts.append)
    return scripted


async def show(world: World, number: int = 1) -> dict[str, Any]:
    return dict((await world.caller()("GET", f"{A}/versions/{number}")).json())


def parity_of(version: dict[str, Any]) -> dict[str, Any]:
    (check,) = [check for check in version["report"]["checks"] if check["name"] == "parity"]
    return dict(check)


async def leave_validating(world: World, number: int = 1) -> dict[str, Any]:
    async def has_left() -> bool:
        return bool((await show(world, number))["state"] != "validating")

    await until(has_left)
    return await show(world, number)


async def begin(world: World, folder: Path, number: int = 1, **params: str) -> asyncio.Task[httpx.Response]:
    """Upload and return once the version waits; its upload waits, too."""

    async def waits() -> bool:
        return (await show(world, number)).get("state") == "validating"

    uploading = asyncio.create_task(world.caller().upload(A, folder, params=params))
    await until(waits)
    return uploading


async def events(world: World) -> list[tuple[str, dict[str, Any]]]:
    async with world.registry.services.database.read() as session:
        rows = (await session.execute(select(EventRow).order_by(EventRow.id))).scalars()
        return [(row.action, row.details) for row in rows]


async def test_what_passes_is_ready_live_and_says_what_was_measured(
    world: World, make_adapter: Any, verdicts: list[str]
) -> None:
    version = (await world.caller().upload(A, make_adapter(1))).json()
    assert (version["state"], version["promoted"], verdicts) == ("ready", True, ["pass"])
    assert version["report"]["parity"]["max_logit_difference"] == 1e-5
    assert parity_of(version)["verdict"] == "pass"
    assert "1e-05 (limit 0.001)" in parity_of(version)["message"]
    assert version == await show(world)
    action, details = (await events(world))[-1]
    assert (action, details["parity"], details["promoted"]) == ("adapter.version_validated", "pass", True)
    assert (details["before"], details["after"]) == ({"state": "validating"}, {"state": "ready"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_logit_difference": 2e-3}, "logit difference 0.002 (limit 0.001)"),
        ({"max_kl": 2e-5}, "KL 2e-05 (limit 1e-05)"),
        ({"is_finite": False}, "not finite"),
    ],
)
@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_beyond_a_limit_is_quarantined_and_only_forced_out(
    world: World, make_adapter: Any, judge: ScriptedJudge, verdicts: list[str], changes: dict[str, Any], says: str
) -> None:
    judge.answer = msgspec.structs.replace(GOOD, **changes)
    folder = make_adapter(1)
    answer = await world.caller().upload(A, folder)
    version = answer.json()
    assert (answer.status_code, version["state"], version["promoted"], verdicts) == (
        201,
        "quarantined",
        False,
        ["fail"],
    )
    assert version["quarantine"]["reason"] == "parity"
    assert says in version["quarantine"]["message"]
    assert says in parity_of(version)["message"]
    assert version["report"]["verdict"] == "fail"
    again = await world.caller().upload(A, folder)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "adapter_quarantined")
    released = await world.caller(role="admin")("POST", f"{A}/versions/1/release")
    assert (released.json()["state"], parity_of(released.json())["verdict"]) == ("ready", "fail")
    action, details = (await events(world))[-1]
    assert (action, details["forced"], details["reason"]) == ("adapter.version_released", True, "parity")


async def test_nobody_waits_longer_than_asked_and_live_moves_with_the_verdict(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.may_answer.clear()
    answer = await world.caller().upload(A, make_adapter(1), params={"wait": "1"})
    assert (answer.status_code, answer.json()["state"], answer.json()["promoted"]) == (201, "validating", False)
    assert not any(check["name"] == "parity" for check in answer.json()["report"]["checks"])
    (adapter,) = (await world.registry.names_delta(0)).adapters
    assert ([version.state for version in adapter.versions], adapter.aliases) == (["validating"], {})
    before = world.registry.epoch.current
    judge.may_answer.set()
    assert (await leave_validating(world))["promoted"]
    assert world.registry.epoch.current > before
    (adapter,) = (await world.registry.names_delta(before)).adapters
    assert [version.state for version in adapter.versions] == ["ready"]


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_what_waits_can_be_neither_retired_nor_released_nor_targeted(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.may_answer.clear()
    team, admin = world.caller(), world.caller(role="admin")
    uploading = await begin(world, make_adapter(1))
    target = {"targets": [{"version": 1, "weight": 100}]}
    for refused in (
        await team("DELETE", f"{A}/versions/1"),
        await admin("POST", f"{A}/versions/1/release"),
        await team("POST", f"{A}/versions/1/restore"),
        await team("PUT", f"{A}/aliases/live", json=target, headers={"if-none-match": "*"}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict"), refused.text
    assert (await admin("POST", f"{A}/versions/1/quarantine")).json()["state"] == "quarantined"
    judge.may_answer.set()
    await asyncio.sleep(0.1)
    assert (await uploading).json()["quarantine"]["reason"] == "by_admin"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_deleted_adapter_takes_what_waits_along(world: World, make_adapter: Any, judge: ScriptedJudge) -> None:
    judge.may_answer.clear()
    uploading = await begin(world, make_adapter(1))
    assert (await world.caller()("DELETE", A)).status_code == 204
    judge.may_answer.set()
    assert (await uploading).status_code == 201
    await until(lambda: not judge.running)
    assert (await world.caller()("GET", A)).status_code == 404


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_promotion_looks_at_what_is_live_by_then(world: World, make_adapter: Any, judge: ScriptedJudge) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    judge.may_answer.clear()
    for number, promote in ((2, "always"), (3, "always"), (4, "auto")):
        await begin(world, make_adapter(number), number, promote=promote)
    judge.may_answer.set()
    assert (await leave_validating(world, 2))["state"] == "ready"
    assert not (await leave_validating(world, 3))["promoted"], "somebody moved live since its upload began"
    assert not (await leave_validating(world, 4))["promoted"], "auto moves nothing that is ready"
    assert (await team("GET", f"{A}/aliases/live")).json()["targets"] == [{"version": 2, "weight": 100}]
    assert judge.most_running == 1, "engines of a base measure one at a time"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_tenant_s_own_content_is_measured_once_for_the_weights_that_are_registered(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.weights = "w" * 64
    team, folder = world.caller(), make_adapter(1)
    first = (await team.upload(A, folder)).json()
    second = (await team.upload(f"{T}/copy", folder)).json()
    assert len(judge.asked) == 1
    assert (second["state"], second["promoted"]) == ("ready", True)
    assert second["report"]["parity"] == first["report"]["parity"]
    other = await world.caller("team-b").upload("/api/v1/tenants/team-b/adapters/style", folder)
    assert (other.json()["state"], len(judge.asked)) == ("ready", 2), "how long it takes would tell who else has it"
    await team.upload(f"{T}/other", make_adapter(2))
    assert len(judge.asked) == 3


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_what_was_measured_on_other_weights_or_found_wrong_is_measured_again(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.weights = "o" * 64
    team, folder = world.caller(), make_adapter(1)
    await team.upload(A, folder)
    await team.upload(f"{T}/copy", folder)
    assert len(judge.asked) == 2, "the registered weights are others"
    judge.weights, judge.answer = "w" * 64, msgspec.structs.replace(GOOD, max_kl=1.0)
    wrong = make_adapter(2)
    for number, name in enumerate(("third", "fourth"), start=3):
        version = (await team.upload(f"{T}/{name}", wrong)).json()
        assert (version["state"], len(judge.asked)) == ("quarantined", number)
        released = await world.caller(role="admin")("POST", f"{T}/{name}/versions/1/release")
        assert released.json()["state"] == "ready"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_another_tenant_s_many_uploads_are_not_waited_for(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.may_answer.clear()
    waiting = world.registry.services.gate._turns[BASE]._waiting
    many = [await begin(world, make_adapter(number), number) for number in (1, 2, 3, 4)]
    await until(lambda: len(judge.running) == 1 and len(waiting.get("id-team-a", ())) == 3)
    path = "/api/v1/tenants/team-b/adapters/style"
    one = asyncio.create_task(world.caller("team-b").upload(path, make_adapter(5)))
    await until(lambda: len(waiting) == 2)
    judge.may_answer.set()
    digest = (await one).json()["digest"]
    await asyncio.gather(*many)
    assert judge.asked.index(digest) == 2, "the one that was measured, and one more of the first tenant"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_an_engine_that_goes_away_is_waited_for_a_while(
    world: World, make_adapter: Any, judge: ScriptedJudge, verdicts: list[str]
) -> None:
    judge.answer = NoVerdictError("it is draining")
    version = (await world.caller().upload(A, make_adapter(1))).json()
    assert (version["state"], version["promoted"], verdicts) == ("ready", True, ["warn"])
    assert len(judge.asked) > 1
    assert parity_of(version)["verdict"] == "warn"
    assert parity_of(version)["message"].startswith("not run")


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_an_engine_that_blames_the_bytes_has_time_to_give_up(
    world: World, make_adapter: Any, judge: ScriptedJudge
) -> None:
    judge.answer = NoVerdictError("digest_mismatch", is_content=True)
    uploading = await begin(world, make_adapter(1))
    await asyncio.sleep(0.5)
    version = await show(world)
    assert version["state"] == "validating", "the patience for engines is over"
    await world.registry.quarantine_failed(version["digest"], "No.", world.identity(None, role="admin"))
    assert (await uploading).json()["quarantine"]["reason"] == "load_failed"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_without_an_engine_an_upload_is_ready_at_once(
    world: World, make_adapter: Any, judge: ScriptedJudge, verdicts: list[str]
) -> None:
    judge.is_there = False
    version = (await world.caller().upload(A, make_adapter(1))).json()
    assert (version["state"], parity_of(version)["verdict"], verdicts) == ("ready", "warn", [])


class TestRequired:
    @pytest.fixture
    def mode(self) -> str:
        return "required"

    @pytest.mark.parametrize("dialect", ["sqlite"])
    async def test_waits_for_an_engine_without_end(
        self, world: World, make_adapter: Any, judge: ScriptedJudge, verdicts: list[str]
    ) -> None:
        judge.is_there = False
        uploading = await begin(world, make_adapter(1))
        await asyncio.sleep(0.5)
        assert ((await show(world))["state"], verdicts) == ("validating", []), "the patience for engines is over"
        judge.is_there = True
        assert (await uploading).json()["promoted"]

    async def test_what_waits_survives_a_restart(
        self, world: World, make_adapter: Any, judge: ScriptedJudge, registry_settings: RegistrySettings
    ) -> None:
        judge.is_there = False
        uploading = await begin(world, make_adapter(1))
        other = create_registry(registry_settings, checker=ThreadChecker())
        other.know_parity(ScriptedJudge(), lambda verdict: None)
        await other.start()
        assert (await uploading).json()["promoted"]
        await other.stop()

    @pytest.mark.parametrize("dialect", ["sqlite"])
    async def test_switched_off_it_lets_go_of_what_waits(
        self, world: World, make_adapter: Any, judge: ScriptedJudge, registry_settings: RegistrySettings
    ) -> None:
        judge.is_there = False
        uploading = await begin(world, make_adapter(1))
        other = create_registry(replace(registry_settings, parity_gate="off"), checker=ThreadChecker())
        await other.start()
        assert parity_of((await uploading).json())["verdict"] == "warn"
        await other.stop()


class TestOff:
    @pytest.fixture
    def mode(self) -> str:
        return "off"

    @pytest.mark.parametrize("dialect", ["sqlite"])
    async def test_asks_nobody_and_says_nothing(self, world: World, make_adapter: Any, judge: ScriptedJudge) -> None:
        version = (await world.caller().upload(A, make_adapter(1))).json()
        assert (version["state"], judge.asked) == ("ready", [])
        assert not any(check["name"] == "parity" for check in version["report"]["checks"])


@pytest.mark.parametrize("dialect", ["postgres"])
async def test_two_processes_that_judge_one_version_settle_it_once(
    world: World, make_adapter: Any, judge: ScriptedJudge, verdicts: list[str], registry_settings: RegistrySettings
) -> None:
    judge.may_answer.clear()
    uploading = await begin(world, make_adapter(1))
    other = create_registry(registry_settings, checker=ThreadChecker())
    told: list[str] = []
    other.know_parity(judge, told.append)
    await other.start()
    await until(lambda: len(judge.asked) == 2)
    judge.may_answer.set()
    assert (await uploading).json()["promoted"]
    await until(lambda: not judge.running)
    await other.stop()
    assert len(verdicts) + len(told) == 1
    assert [action for action, _ in await events(world)].count("adapter.version_validated") == 1
    assert (await world.caller()("GET", f"{A}/aliases/live")).json()["revision"] == 1
