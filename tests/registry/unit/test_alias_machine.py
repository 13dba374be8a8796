"""Random moves of aliases by many hands: every act keeps the rows whole, and a model in memory agrees."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.integrity import check_integrity
from loraplex_registry.adapters.lifecycle import Lifecycle
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.aliases import Aliases, Precondition
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.errors import ConflictError, NotFoundError, PreconditionFailedError
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.identity import Identity

TENANT = TenantRef("id", "team-a")
BY = Identity(role="tenant", tenant_id="id", tenant="team-a", scopes=(), key_id="k", actor="a", request_id="r")
NUM_VERSIONS = 4
numbers = st.integers(1, NUM_VERSIONS)
names = st.sampled_from(["live", "canary"])


class AliasMachine(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-alias-"))
        shutil.copyfile(self.template, self.folder / "db")
        self.database = Database(f"sqlite+aiosqlite:///{self.folder}/db")
        self.aliases, self.lifecycle = Aliases(self.database), Lifecycle(self.database)
        self.history: dict[str, list[tuple[int, ...]]] = {"live": [], "canary": []}
        self.retired: set[int] = set()

    def teardown(self) -> None:
        self.run(self.database.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

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
                change.session.add(
                    VersionRow(
                        adapter_id=adapter.id, adapter=adapter, number=number, kind="lora", state="ready", rank=1,
                        digest=f"sha256:{number:064x}", target_modules=[], num_parameters=1, size_bytes=1, files=[],
                        report={"verdict": "pass", "checks": []}, created_by="a",
                    )
                )  # fmt: skip
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
        elif self.retired & set(chosen):
            with pytest.raises(ConflictError):
                self.run(putting)
        else:
            self.run(putting)
            self.history[name].append(chosen)

    @rule(name=names)
    def roll_back(self, name: str) -> None:
        rolling = self.aliases.roll_back(TENANT, "style", name, Precondition(), BY)
        past = self.history[name]
        if not self.targets_of(name):
            with pytest.raises(NotFoundError):
                self.run(rolling)
        elif len(past) < 2 or not past[-2] or self.retired & set(past[-2]):
            with pytest.raises(ConflictError):
                self.run(rolling)
        else:
            self.run(rolling)
            past.append(past[-2])

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
        if any(number in self.targets_of(name) for name in self.history):
            with pytest.raises(ConflictError):
                self.run(retiring)
        else:
            self.run(retiring)
            self.retired.add(number)

    @rule(number=numbers)
    def restore(self, number: int) -> None:
        restoring = self.lifecycle.restore(TENANT, "style", number, BY)
        if number not in self.retired:
            with pytest.raises(ConflictError):
                self.run(restoring)
        else:
            self.run(restoring)
            self.retired.discard(number)

    @invariant()
    def rows_are_whole_and_the_model_agrees(self) -> None:
        async def look() -> dict[str, tuple[int, ...]]:
            async with self.database.read() as session:
                await check_integrity(session)
            listed = await self.aliases.list(TENANT, "style")
            return {alias.alias: tuple(target.version for target in alias.targets) for alias in listed}

        if any(self.history.values()):
            shown = self.run(look())
            assert shown == {name: self.targets_of(name) for name in self.history if self.targets_of(name)}


def test_random_moves_keep_aliases_whole(sqlite_template: Path) -> None:
    machine = type("Machine", (AliasMachine,), {"template": sqlite_template})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))
