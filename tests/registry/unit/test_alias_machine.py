"""Random acts on versions and aliases by many hands: every act keeps the rows whole, and a model in memory agrees."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.integrity import check_integrity
from loraplex_registry.adapters.lifecycle import Lifecycle
from loraplex_registry.adapters.pending import Pending, Promote
from loraplex_registry.adapters.retention import Retention
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.aliases import Aliases, Precondition
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.errors import (
    ConflictError,
    NotFoundError,
    PreconditionFailedError,
    QuarantinedError,
    RegistryError,
    RetiredError,
)
from loraplex_registry.parity.gate import ParityGate
from loraplex_registry.parity.outcome import Outcome
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.promotion import promote_ready
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.identity import Identity

TENANT = TenantRef("id", "team-a")
BY = Identity(role="tenant", tenant_id="id", tenant="team-a", scopes=(), key_id="k", actor="a", request_id="r")
NUM_VERSIONS = 4
MAX_VERSIONS = 7
numbers = st.integers(1, MAX_VERSIONS)
names = st.sampled_from(["live", "canary"])


def build_version(adapter: AdapterRow, number: int, state: str, pending: Any) -> VersionRow:
    return VersionRow(
        adapter_id=adapter.id, adapter=adapter, number=number, kind="lora", state=state, rank=1, pending=pending,
        digest=f"sha256:{number:064x}", target_modules=[], num_parameters=1, size_bytes=1, files=[],
        report={"verdict": "pass", "checks": []}, created_by="a",
    )  # fmt: skip


class AliasMachine(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-alias-"))
        shutil.copyfile(self.template, self.folder / "db")
        self.database = Database(f"sqlite+aiosqlite:///{self.folder}/db")
        self.aliases, self.lifecycle = Aliases(self.database), Lifecycle(self.database)
        settings = RegistrySettings(database_url="", object_store_url="", purge_after_days=0)
        self.retention = Retention(self.database, settings)
        self.gate = ParityGate(self.database, settings, promote_ready)
        self.history: dict[str, list[tuple[int, ...]]] = {"live": [], "canary": []}
        self.state_of = dict.fromkeys(range(1, NUM_VERSIONS + 1), "ready")
        self.state_before: dict[int, str] = {}
        self.pending: dict[int, tuple[Promote, int]] = {}

    def teardown(self) -> None:
        self.run(self.database.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def are_ready(self, numbers: Iterable[int]) -> bool:
        return all(self.state_of.get(number) == "ready" for number in numbers)

    def targets_of(self, name: str) -> tuple[int, ...]:
        return self.history[name][-1] if self.history[name] else ()

    @initialize()
    def begin(self) -> None:
        async def work(change: Change) -> None:
            base = BaseRow(
                name="b", accepted_names=[], fingerprint="f", weights_digest="", architecture="a", vocab_size=1,
                modules={}, max_lora_rank=1, default_context=1, max_saved_bytes=1, matrix_hashes={},
                changed_epoch=change.epoch,
            )  # fmt: skip
            change.session.add(base)
            await change.session.flush()
            adapter = AdapterRow(
                tenant_id="id", tenant="team-a", name="style", base_id=base.id, base=base, is_default=False,
                next_number=NUM_VERSIONS + 1, created_by="a", changed_epoch=change.epoch,
            )  # fmt: skip
            change.session.add(adapter)
            await change.session.flush()
            for number in range(1, NUM_VERSIONS + 1):
                change.session.add(build_version(adapter, number, "ready", None))
            await change.session.flush()
            await set_targets(change, adapter, "live", [Target(1, 100)], "upload", "a")

        self.run(self.database.change(work))
        self.history["live"].append((1,))

    @rule(name=names, first=numbers, second=numbers, is_stale=st.booleans())
    def put(self, name: str, first: int, second: int, is_stale: bool) -> None:
        chosen = tuple(sorted({first, second}))
        share = 100 // len(chosen)
        targets = [Target(number, share) for number in chosen]
        revision = len(self.history[name])
        seen = Precondition(revisions=frozenset({revision + 1 if is_stale else revision}))
        if not self.targets_of(name) and not is_stale:
            seen = Precondition(must_be_absent=True)
        putting = self.aliases.put(TENANT, "style", name, targets, seen, BY)
        if is_stale:
            with pytest.raises(PreconditionFailedError):
                self.run(putting)
        elif not self.are_ready(chosen):
            # the first target that cannot be one is told
            first_wrong = next(number for number in chosen if not self.are_ready([number]))
            self.expect(ConflictError if first_wrong in self.state_of else NotFoundError, putting)
        else:
            self.run(putting)
            self.history[name].append(chosen)

    @rule(name=names)
    def roll_back(self, name: str) -> None:
        rolling = self.aliases.roll_back(TENANT, "style", name, Precondition(), BY)
        past, now = self.history[name], self.targets_of(name)
        before = next((targets for targets in reversed(past) if targets != now), ())
        if not now:
            with pytest.raises(NotFoundError):
                self.run(rolling)
        elif not before or not self.are_ready(before):
            with pytest.raises(ConflictError):
                self.run(rolling)
        else:
            self.run(rolling)
            past.append(before)

    @rule(name=names)
    def delete(self, name: str) -> None:
        deleting = self.aliases.delete(TENANT, "style", name, Precondition(), BY)
        if not self.targets_of(name):
            with pytest.raises(NotFoundError):
                self.run(deleting)
        else:
            self.run(deleting)
            self.history[name].append(())

    @rule(number=numbers)
    def retire(self, number: int) -> None:
        retiring = self.lifecycle.retire(TENANT, "style", number, BY)
        is_target = any(number in self.targets_of(name) for name in self.history)
        if self.refuses(number, retiring, allows_quarantined=True):
            return
        if self.state_of[number] == "validating" or (is_target and self.state_of[number] != "retired"):
            self.expect(ConflictError, retiring)
        else:
            self.run(retiring)
            if self.state_of[number] != "retired":
                self.state_before[number], self.state_of[number] = self.state_of[number], "retired"

    @rule(number=numbers)
    def restore(self, number: int) -> None:
        restoring = self.lifecycle.restore(TENANT, "style", number, BY)
        if self.refuses(number, restoring):
            return
        if self.state_of[number] != "retired":
            self.expect(ConflictError, restoring)
        else:
            self.run(restoring)
            self.state_of[number] = self.state_before[number]

    @rule(number=numbers)
    def quarantine(self, number: int) -> None:
        taking = self.lifecycle.quarantine(TENANT, "style", number, BY)
        if self.refuses(number, taking, allows_quarantined=True):
            return
        if self.state_of[number] == "retired":
            self.expect(ConflictError, taking)
        else:
            self.run(taking)
            self.state_of[number] = "quarantined"
            self.pending.pop(number, None)

    @rule(number=numbers)
    def release(self, number: int) -> None:
        releasing = self.lifecycle.release(TENANT, "style", number, BY)
        if self.refuses(number, releasing, allows_quarantined=True):
            return
        if self.state_of[number] in ("retired", "validating"):
            self.expect(ConflictError, releasing)
        else:
            self.run(releasing)
            self.state_of[number] = "ready"

    @precondition(lambda self: len(self.state_of) < MAX_VERSIONS)
    @rule(promote=st.sampled_from(["auto", "always", "never"]))
    def upload(self, promote: Promote) -> None:
        number, revision = len(self.state_of) + 1, len(self.history["live"])

        async def work(change: Change) -> None:
            adapter = (await change.session.execute(sa.select(AdapterRow))).scalar_one()
            adapter.next_number = number + 1
            pending = Pending(promote=promote, live_revision=revision, actor="a", key_id="k", request_id="r")
            change.session.add(build_version(adapter, number, "validating", msgspec.to_builtins(pending)))

        self.run(self.database.change(work))
        self.state_of[number], self.pending[number] = "validating", (promote, revision)

    @rule(number=numbers, passes=st.booleans())
    def judge(self, number: int, passes: bool) -> None:
        async def find() -> uuid.UUID:
            async with self.database.read() as session:
                return (await session.execute(sa.select(VersionRow.id).where(VersionRow.number == number))).scalar_one()

        if number not in self.state_of:
            return
        result = ParityResult(
            dtype="float32", num_prompts=1, num_positions=1, max_logit_difference=0.0, max_kl=0.0 if passes else 1.0,
            base_logit_difference=0.0, base_kl=0.0, logit_limit=0.1, kl_limit=0.1,
        )  # fmt: skip
        self.run(self.gate.settle(self.run(find()), Outcome(result)))
        if self.state_of[number] != "validating":
            return
        promote, revision = self.pending.pop(number)
        live = self.targets_of("live")
        self.state_of[number] = "ready" if passes else "quarantined"
        is_unmoved = revision == len(self.history["live"])
        has_ready = any(self.state_of[target] == "ready" for target in live)
        if passes and ((promote == "always" and is_unmoved) or (promote == "auto" and not has_ready)):
            self.history["live"].append((number,))

    @rule()
    def purge(self) -> None:
        retired = [number for number, state in self.state_of.items() if state == "retired"]
        assert self.run(self.retention.purge()) == len(retired)
        self.state_of.update(dict.fromkeys(retired, "purged"))

    def refuses(self, number: int, act: Any, *, allows_quarantined: bool = False) -> bool:
        """Whether an act is refused for what is there; then it is tried, and is."""
        state = self.state_of.get(number)
        errors: dict[str | None, type[RegistryError]] = {None: NotFoundError, "purged": RetiredError}
        if not allows_quarantined:
            errors["quarantined"] = QuarantinedError
        if state not in errors:
            return False
        self.expect(errors[state], act)
        return True

    def expect(self, error: type[RegistryError], act: Any) -> None:
        with pytest.raises(error):
            self.run(act)

    @invariant()
    def rows_are_whole_and_the_model_agrees(self) -> None:
        async def look() -> dict[str, tuple[int, ...]]:
            async with self.database.read() as session:
                await check_integrity(session)
                rows = await session.execute(sa.select(VersionRow.number, VersionRow.state))
                assert {row.number: row.state for row in rows} == self.state_of
            listed = await self.aliases.list(TENANT, "style")
            return {alias.alias: tuple(target.version for target in alias.targets) for alias in listed}

        if any(self.history.values()):
            shown = self.run(look())
            assert shown == {name: self.targets_of(name) for name in self.history if self.targets_of(name)}


def test_random_moves_keep_aliases_whole(sqlite_template: Path) -> None:
    machine = type("Machine", (AliasMachine,), {"template": sqlite_template})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
