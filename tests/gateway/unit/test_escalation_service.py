"""Random verbs by two gateways that die in the middle: what a verb has moved and noted is true of the models.

A gateway that dies before its note leaves an escalation that stands where it stood, though its models may have moved:
that alone may be untrue until the next look of any gateway, which does to its end or takes back what was begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from loraplex.db.database import Database
from loraplex.db.tables import escalation
from loraplex.errors import ConflictError, NoReplicaError
from loraplex.escalations.act import Approval, EscalationOpening, Registration
from loraplex.escalations.evidence import Evidence, RankTried
from loraplex.escalations.machine import OPEN_STATES, SERVING_STATES
from loraplex.escalations.service import EscalationService
from loraplex_registry.errors import NotFoundError
from loraplex_registry.wire.full import Measured
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_uuid

When = Literal["", "before", "after"]
MOVING = ("register", "activate", "revert", "close")
"""Verbs that move versions and aliases."""

FULLS = ["sha256:" + letter * 64 for letter in "ab"]
EVIDENCE = Evidence(
    evaluation="e", data_digest=FULLS[0], num_samples=9, metric="m", base=0.1, lora=0.2, target=0.5,
    ranks_tried=[RankTried(8, 0.2)],
)  # fmt: skip


class DiedError(Exception):
    """The gateway is gone."""


class FakeModels:
    """Versions and the alias `live` of one adapter, as the registry keeps them; may die before or after an act."""

    def __init__(self) -> None:
        self.live = "lora"
        self.former: str | None = None
        self.full: dict[str, str] = {}
        self.dies: When = ""

    async def _act(self, act: Callable[[], Any]) -> Any:
        if self.dies == "before":
            raise DiedError
        found = act()
        if self.dies == "after":
            raise DiedError
        return found

    async def measure_saturation(self, by: Identity, adapter: str, number: int | None) -> Measured:
        return Measured(adapter_id="adapter", base="tiny", version=1, digest=FULLS[0])

    async def register_full(self, by: Identity, adapter: str, escalation: str, pool: str, digest: str) -> Any:
        def act() -> Any:
            self.full[escalation] = digest
            return type("Version", (), {"version": len(self.full) + 1, "digest": digest})()

        return await self._act(act)

    async def activate_full(self, by: Identity, adapter: str, escalation: str) -> Any:
        def act() -> Any:
            if escalation not in self.full:
                raise NotFoundError("This escalation has no full fine-tune that is served", param="escalation")
            self.former, self.live = self.former or self.live, escalation
            return None, type("Replaced", (), {"targets": ()})()

        return await self._act(act)

    def _put_back(self, escalation: str) -> None:
        if self.live == escalation:
            self.live, self.former = self.former or "", None

    async def revert_full(self, by: Identity, adapter: str, escalation: str) -> None:
        await self._act(lambda: self._put_back(escalation))

    async def withdraw_full(self, by: Identity, adapter: str, escalation: str) -> None:
        def act() -> None:
            self._put_back(escalation)
            self.full.pop(escalation, None)

        await self._act(act)


class AnyPool:
    def check_pool(self, name: str) -> None:
        pass

    async def wait_ready(self, name: str, digest: str, timeout_s: float) -> None:
        pass


class NoPool(AnyPool):
    async def wait_ready(self, name: str, digest: str, timeout_s: float) -> None:
        raise NoReplicaError("No engine serves this model")


def someone(owner: str) -> Identity:
    return Identity(
        role="admin", tenant_id=None, tenant=None, scopes=(), key_id=f"key_{owner}", actor=owner, request_id="req_1",
        target_tenant_id=str(new_uuid()), target_tenant="team-x",
    )  # fmt: skip


TINA, GRACE = someone("tina"), someone("grace")


class ServiceMachine(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-esc-"))
        shutil.copyfile(self.template, self.folder / "db")
        self.models = FakeModels()
        self.databases = [Database(f"sqlite+aiosqlite:///{self.folder}/db") for _ in range(2)]
        self.gateways = [EscalationService(database, self.models, AnyPool()) for database in self.databases]
        self.id = ""
        self.begun = ""
        self.num_days = 10

    def teardown(self) -> None:
        for database in self.databases:
            self.run(database.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def look(self) -> Any:
        return self.run(self.gateways[0].get(GRACE, self.id))

    @initialize()
    def open_first(self) -> None:
        self.open()

    def open(self) -> None:
        wanted = EscalationOpening(adapter="a", version=None, evidence=EVIDENCE, reason=None, expires_at=None)
        self.run(self.gateways[0].open(TINA, wanted, None))
        (row,) = self.run(self.gateways[0].list_open())
        self.id = row["public_id"]

    @rule()
    def open_another(self) -> None:
        if self.look().state not in OPEN_STATES:
            self.open()

    def act(self, gateway: int, verb: str, dies: When, **options: Any) -> None:
        before = self.look()
        self.models.dies = dies
        acting = getattr(self.gateways[gateway], verb)(GRACE, self.id, **options)
        try:
            after = self.run(acting)
        except ConflictError:
            is_other = bool(self.begun) and verb in MOVING and verb != self.begun
            assert verb not in before.verbs or verb == "activate" or is_other, "what is listed can be done"
            after = None
        except DiedError:
            after = None
            shown = self.look()
            assert shown.history == before.history, "what was not noted did not happen"
            assert verb in shown.verbs, "it can be given again"
            self.begun = verb
        self.models.dies = ""
        if after is not None:
            assert verb in before.verbs
            self.begun = "" if verb in MOVING else self.begun
            self.check_true(after)

    def check_true(self, shown: Any) -> None:
        """What is noted is so, unless something was begun and not noted."""
        if self.begun:
            return
        is_serving, is_registered = shown.state in SERVING_STATES, shown.state in ("registered", *SERVING_STATES)
        assert (self.models.live, self.models.former) == ((self.id, "lora") if is_serving else ("lora", None))
        assert self.models.full.get(self.id) == (shown.full.digest if is_registered else None)

    gateways_ = st.integers(0, 1)
    deaths = st.sampled_from(["", "", "", "before", "after"])

    @rule(gateway=gateways_, on_overdue=st.sampled_from(["keep", "revert"]))
    def approve(self, gateway: int, on_overdue: Any) -> None:
        wanted = Approval(
            owner="grace", justification="x", budget_per_month=5.0, currency=None,
            review_at=datetime.now(UTC) + timedelta(days=9), on_overdue=on_overdue,
        )  # fmt: skip
        self.act(gateway, "approve", "", wanted=wanted)

    @rule(gateway=gateways_, dies=deaths, digest=st.sampled_from(FULLS))
    def register(self, gateway: int, dies: When, digest: str) -> None:
        wanted = Registration(pool="p", digest=digest, cost_per_month=None)
        self.act(gateway, "register", dies, wanted=wanted)

    @rule(gateway=gateways_, dies=deaths)
    def activate(self, gateway: int, dies: When) -> None:
        self.act(gateway, "activate", dies, wait_s=0.0)

    @rule(gateway=gateways_, dies=deaths)
    def activate_again(self, gateway: int, dies: When) -> None:
        self.act(gateway, "activate", dies, wait_s=0.0)

    @rule(gateway=gateways_, dies=deaths)
    def revert(self, gateway: int, dies: When) -> None:
        self.act(gateway, "revert", dies, reason=None)

    @rule(gateway=gateways_, dies=deaths, is_wanted=st.integers(0, 3))
    def close(self, gateway: int, dies: When, is_wanted: int) -> None:
        if is_wanted == 0:
            self.act(gateway, "close", dies, reason="enough")

    @rule(gateway=gateways_, dies=deaths)
    def look_around(self, gateway: int, dies: When) -> None:
        """A gateway, which may die of it, too, finishes what it finds; after that all is as it is noted."""
        self.models.dies = dies
        for public_id in self.run(self.gateways[gateway].list_unfinished()):
            assert self.begun
            with contextlib.suppress(DiedError):
                self.run(self.gateways[gateway].finish(public_id))
        self.models.dies = ""
        for public_id in self.run(self.gateways[1 - gateway].list_unfinished()):
            assert dies, "it was finished"
            self.run(self.gateways[1 - gateway].finish(public_id))
        assert self.run(self.gateways[gateway].list_unfinished()) == []
        self.begun = ""
        self.check_true(self.look())

    @rule(gateway=gateways_)
    def extend(self, gateway: int) -> None:
        self.num_days += 1
        review_at = datetime.now(UTC) + timedelta(days=self.num_days)
        self.act(gateway, "extend", "", review_at=review_at, reason=None)

    @rule(gateway=gateways_)
    def time_passes(self, gateway: int) -> None:
        """The review date comes, and whichever gateway looks first does what is due."""
        self.look_around(gateway, "")
        before = self.look()
        if before.state not in SERVING_STATES:
            return
        values = {"review_at": datetime.now(UTC) - timedelta(seconds=1)}
        query = sa.update(escalation).where(escalation.c.public_id == self.id).values(values)

        async def work() -> None:
            async with self.databases[0].write() as connection:
                await connection.execute(query)
            await self.gateways[gateway].do_due(GRACE, self.id)
            await self.gateways[1 - gateway].do_due(GRACE, self.id)

        self.run(work())
        after = self.look()
        assert after.state == ("registered" if after.approval.on_overdue == "revert" else "overdue")
        self.check_true(after)

    @invariant()
    def history_is_a_line(self) -> None:
        if not self.id:
            return
        history = self.look().history
        states = [step.to_state for step in history]
        assert [step.from_state for step in history] == [None, *states[:-1]]
        assert history[0].verb == "open"


def test_what_is_noted_is_true_whoever_dies(sqlite_template: Path, long: Callable[[float, float], float]) -> None:
    machine = type("Machine", (ServiceMachine,), {"template": sqlite_template})
    # a step is a transaction: to shrink twenty of them takes minutes, and to read them does not
    options = settings(
        max_examples=int(long(10, 400)), stateful_step_count=20, deadline=None,
        phases=(Phase.reuse, Phase.generate), suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=options)


OPTIONS: dict[str, dict[str, Any]] = {
    "register": {"wanted": Registration(pool="p", digest=FULLS[0], cost_per_month=None)},
    "activate": {"wait_s": 0.0},
    "revert": {"reason": None},
    "close": {"reason": None},
}


def lead_to(machine: ServiceMachine, state: str) -> None:
    machine.open_first()
    machine.approve(gateway=0, on_overdue="keep")
    for verb, reached in (("register", "registered"), ("activate", "active")):
        if state in (reached, "active"):
            machine.act(0, verb, "", **OPTIONS[verb])


@pytest.mark.parametrize("dies", ["before", "after"])
@pytest.mark.parametrize("ends", ["by the same verb", "by a look"])
@pytest.mark.parametrize(
    ("state", "begun", "reached"),
    [
        ("approved", "register", "registered"),
        ("registered", "activate", "active"),
        ("active", "revert", "registered"),
        ("registered", "close", "closed"),
        ("active", "close", "closed"),
    ],
)
def test_what_was_begun_is_done_to_its_end_before_anything_else(
    sqlite_template: Path, state: str, begun: str, reached: str, dies: When, ends: str
) -> None:
    machine: ServiceMachine = type("Machine", (ServiceMachine,), {"template": sqlite_template})()
    try:
        lead_to(machine, state)
        machine.act(0, begun, dies, **OPTIONS[begun])
        assert machine.look().state == state
        for other in MOVING:
            if other != begun and other in machine.look().verbs:
                with pytest.raises(ConflictError, match=f"Its {begun} was cut off and is being finished"):
                    machine.run(getattr(machine.gateways[1], other)(GRACE, machine.id, **OPTIONS[other]))
        machine.extend(gateway=0)
        if ends == "by a look":
            machine.look_around(1, "")
            # what it would have cost is not known
            reached = "approved" if begun == "register" else reached
        else:
            machine.act(1, begun, "", **OPTIONS[begun])
        shown = machine.look()
        assert (shown.state, machine.begun) == (reached, "")
        machine.check_true(shown)
        if ends == "by a look" and begun != "register":
            assert shown.history[-1].details["reason"].startswith("Finished by the platform")
    finally:
        machine.teardown()


@pytest.mark.parametrize("obstacle", ["pool", "review"])
def test_an_activation_that_cannot_be_finished_any_more_is_taken_back(sqlite_template: Path, obstacle: str) -> None:
    machine: ServiceMachine = type("Machine", (ServiceMachine,), {"template": sqlite_template})()
    try:
        lead_to(machine, "registered")
        machine.act(0, "activate", "after", wait_s=0.0)
        assert machine.models.live == machine.id
        if obstacle == "pool":
            machine.gateways[1]._pools = NoPool()
        else:
            machine.run(set_columns(machine, review_at=datetime.now(UTC) - timedelta(seconds=1)))
        for public_id in machine.run(machine.gateways[1].list_unfinished()):
            machine.run(machine.gateways[1].finish(public_id))
        shown = machine.look()
        assert (shown.state, shown.history[-1].verb, machine.models.live) == ("registered", "register", "lora")
        assert machine.run(machine.gateways[0].list_unfinished()) == []
    finally:
        machine.teardown()


def test_what_is_held_is_let_alone_until_the_hold_lapses(sqlite_template: Path) -> None:
    machine: ServiceMachine = type("Machine", (ServiceMachine,), {"template": sqlite_template})()
    try:
        lead_to(machine, "active")
        machine.act(0, "revert", "after", reason=None)
        machine.run(set_columns(machine, held_until=datetime.now(UTC) + timedelta(seconds=9)))
        assert machine.run(machine.gateways[1].list_unfinished()) == []
        machine.run(machine.gateways[1].finish(machine.id))
        assert machine.look().state == "active"
        with pytest.raises(ConflictError, match="Another request"):
            machine.run(machine.gateways[1].revert(GRACE, machine.id, None))
    finally:
        machine.teardown()


async def set_columns(machine: ServiceMachine, **values: Any) -> None:
    async with machine.databases[0].write() as connection:
        await connection.execute(sa.update(escalation).values(**values))


async def test_a_hold_that_was_lost_notes_nothing(sqlite_template: Path, tmp_path: Path) -> None:
    """Whoever was away for more than a minute finds that another one has moved it meanwhile."""
    shutil.copyfile(sqlite_template, tmp_path / "db")
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/db")
    models = FakeModels()
    service = EscalationService(database, models, AnyPool())
    wanted = EscalationOpening(adapter="a", version=None, evidence=EVIDENCE, reason=None, expires_at=None)
    await service.open(TINA, wanted, None)
    (row,) = await service.list_open()

    async def withdraw(by: Identity, adapter: str, public_id: str) -> None:
        async with database.write() as connection:
            await connection.execute(sa.update(escalation).values(held_by="hold_of_another"))

    models.withdraw_full = withdraw  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="took too long"):
        await service.close(GRACE, row["public_id"], None)
    assert (await service.get(GRACE, row["public_id"])).state == "requested"
    await database.close()
