"""The parity gate: takes `validating` versions to a judge and makes them ready, or quarantines them.

It waits for nobody's request: an upload hands its version over and may wait for the outcome. Versions that another
process left behind are found again. The outcome is one transaction: report, state, alias `live`, event.

A version is bound to the weights that it was compared on. Once its base is registered with others, it is compared on
those, and bound to them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters import version_state
from loraplex_registry.adapters.agent import build_agent
from loraplex_registry.adapters.pending import Pending, read_pending
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.errors import RegistryError
from loraplex_registry.parity.judge import NoEngines, NoVerdictError, ParityJudge
from loraplex_registry.parity.outcome import NOT_RUN, Outcome
from loraplex_registry.parity.turns import TenantTurns
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.report import Report
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.wire.ending import end_tasks

__all__ = ["NOT_RUN", "ParityGate", "ParityJudge", "PromoteReady"]
PromoteReady = Callable[[Change, VersionRow, Pending], Awaitable[bool]]
"""Moves `live` to a version that has just become ready, if its upload asked so; says whether it moved."""

_MEASURE_TIMEOUT_S = 330.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0
_CONTENT_PATIENCE = 5
"""An engine that blames the bytes tries five times before they are quarantined: nothing passes for want of patience."""

_FOUND_EVERY_S = 5.0
_LEFT_BEHIND = timedelta(seconds=90)
"""Age from which a version counts as left behind by the process that admitted it."""

_MAX_FOUND = 1000
_ACTOR = "parity gate"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Subject:
    """A version that waits: its base's name, whose it is, its content and rank."""

    base: str
    tenant_id: str
    digest: str
    rank: int


@dataclass(frozen=True)
class _Outdated(_Subject):
    """A ready version that was compared on other weights than are registered now, which are `wanted`."""

    version_id: uuid.UUID
    weights: str
    wanted: str


_SUBJECT = (BaseRow.name, AdapterRow.tenant_id, VersionRow.digest, VersionRow.rank)
"""The columns of a `_Subject`."""


class ParityGate:
    """Decides which versions wait, and lets them through.

    Args:
        database: Where versions are.
        settings: `parity_gate` is `required`, `when_available` or `off`; `parity_patience_s` is how long a version
            waits for an engine under `when_available`.
        promote: Called in the transaction that makes a version ready.
    """

    def __init__(self, database: Database, settings: RegistrySettings, promote: PromoteReady) -> None:
        self._database = database
        self._settings = settings
        self._promote = promote
        self._jobs: dict[uuid.UUID, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, TenantTurns] = defaultdict(TenantTurns)
        self._is_stopped = False
        self.judge: ParityJudge = NoEngines()
        self.on_outcome: Callable[[str], None] = _tell_nobody
        """Told of every verdict (pass, warn, fail) once it is committed; must return at once."""

    def applies_to(self, base: str) -> bool:
        """Return whether a new version on this base is written as `validating`, from memory."""
        if self._settings.parity_gate == "when_available":
            return self.judge.has_engine(base)
        return self._settings.parity_gate == "required"

    def submit(self, version_id: uuid.UUID) -> None:
        """Begin to judge a version whose row is committed as `validating`; returns at once."""
        if version_id in self._jobs or self._is_stopped:
            return
        task = asyncio.create_task(self._see_through(version_id))
        self._jobs[version_id] = task
        task.add_done_callback(lambda _: self._jobs.pop(version_id, None))

    async def wait(self, version_id: uuid.UUID, timeout_s: float) -> None:
        """Return once a submitted version has left `validating`, at the latest after `timeout_s` seconds.

        One that another process judges is not waited for.
        """
        task = self._jobs.get(version_id)
        if task is not None:
            await asyncio.wait([task], timeout=max(0.0, timeout_s))

    async def run(self) -> None:
        """Find versions that wait and are nobody's, until cancelled; the first look takes all there are.

        Those that were compared on weights of the past are compared again beside it, one after the other.
        """
        min_age = timedelta(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_up())
            while True:
                try:
                    for version_id in await self._find_waiting(min_age):
                        self.submit(version_id)
                    min_age = _LEFT_BEHIND
                except RegistryError as error:
                    _log.warning("versions that wait for the parity gate cannot be read: %s", error)
                await asyncio.sleep(_FOUND_EVERY_S)

    async def stop(self) -> None:
        """Leave what waits to the next start; nothing more is taken up."""
        self._is_stopped = True
        await end_tasks(self._jobs.values())

    async def _find_waiting(self, min_age: timedelta) -> list[uuid.UUID]:
        query = (
            sa.select(VersionRow.id)
            .where(VersionRow.state == "validating", VersionRow.created_at <= datetime.now(UTC) - min_age)
            .order_by(VersionRow.id)
            .limit(_MAX_FOUND)
        )
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())

    async def _keep_up(self) -> None:
        """Compare what was compared on other weights than are registered now, for ever."""
        while self._settings.is_gated:
            try:
                outdated = await self._find_outdated()
                unserved: set[str] = set()
                # in another order than other processes, which find the same
                for one in random.sample(outdated, len(outdated)):
                    if one.base not in unserved and not await self._compare_again(one):
                        unserved.add(one.base)
            except RegistryError as error:
                _log.warning("versions that were compared on other weights cannot be read: %s", error)
            except Exception:  # noqa: BLE001 - what one engine answers must not end it for all
                _log.exception("a version could not be compared again")
            await asyncio.sleep(_FOUND_EVERY_S)

    async def _find_outdated(self, version_id: uuid.UUID | None = None) -> list[_Outdated]:
        query = (
            sa.select(*_SUBJECT, VersionRow.id, VersionRow.weights_digest, BaseRow.weights_digest)
            .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
            .join(BaseRow, BaseRow.id == AdapterRow.base_id)
            .where(VersionRow.state == "ready", AdapterRow.deleted_at.is_(None))
            .where(VersionRow.weights_digest != BaseRow.weights_digest, BaseRow.weights_digest != "")
            .limit(_MAX_FOUND)
        )
        if version_id is not None:
            query = query.where(VersionRow.id == version_id)
        async with self._database.read() as session:
            return [
                _Outdated(base, tenant_id, digest, rank, found, weights, wanted)
                for base, tenant_id, digest, rank, found, weights, wanted in await session.execute(query)
                if weights is not None
            ]

    async def _compare_again(self, one: _Outdated) -> bool:
        """Compare a version on the weights that are registered now; False if no engine serves with them.

        Raises:
            UnavailableError: The database does not answer.
        """
        if await self._find_outdated(one.version_id):
            try:
                result = await self._ask(one, one.wanted)
            except NoVerdictError:
                return True
            if result is None:
                return False
            await self._settle_again(one, Outcome(result))
        return True

    async def _settle_again(self, one: _Outdated, outcome: Outcome) -> None:
        async def work(change: Change) -> None:
            version = await change.session.get(VersionRow, one.version_id)
            if version is None or (version.state, version.weights_digest) != ("ready", one.weights):
                return
            self._note(version, outcome)
            by = build_agent(_ACTOR)
            if outcome.is_fault:
                version_state.quarantine(change, version, by, "parity", outcome.check.message)
                return
            details = {"parity": outcome.check.verdict, "weights_digest": version.weights_digest}
            before = version_state.set_ready(change, version)
            version_state.record_act(change, version, by, "adapter.version_validated", before, **details)

        await self._database.change(work)
        self.on_outcome(outcome.check.verdict)

    async def _see_through(self, version_id: uuid.UUID) -> None:
        """Try until the version no longer waits; neither engine nor database ends this."""
        retry_s, waited_since = _FIRST_RETRY_S, asyncio.get_running_loop().time()
        while True:
            try:
                subject = await self._find_subject(version_id)
                if subject is None:
                    return
                outcome = await self._measure(subject, asyncio.get_running_loop().time() - waited_since)
                if outcome is not None:
                    await self.settle(version_id, outcome)
                    return
            except RegistryError as error:
                _log.warning("the parity gate has to wait for the database: %s", error)
            except Exception:  # noqa: BLE001 - a version must not wait for ever
                _log.exception("the parity gate failed on version %s and tries again", version_id)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    async def _find_subject(self, version_id: uuid.UUID) -> _Subject | None:
        query = (
            sa.select(*_SUBJECT)
            .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
            .join(BaseRow, BaseRow.id == AdapterRow.base_id)
            .where(VersionRow.id == version_id, VersionRow.state == "validating")
        )
        async with self._database.read() as session:
            found = (await session.execute(query)).one_or_none()
        return None if found is None else _Subject(*found)

    async def _measure(self, subject: _Subject, waited_s: float) -> Outcome | None:
        """Return the outcome; None if there is none yet. Engines measure one version of a base at a time."""
        mode = self._settings.parity_gate
        if mode == "off":
            return Outcome(None)
        patience_s = self._settings.parity_patience_s
        try:
            result = await self._ask(subject)
        except NoVerdictError as error:
            result, patience_s = None, patience_s * (_CONTENT_PATIENCE if error.is_content else 1)
        if result is not None:
            return Outcome(result)
        return Outcome(None) if mode == "when_available" and waited_s >= patience_s else None

    async def _ask(self, subject: _Subject, weights: str | None = None) -> ParityResult | None:
        """Return what an engine measured, None if none did.

        Raises:
            NoVerdictError: One was asked and could not say.
            UnavailableError: The database does not answer.
        """
        try:
            async with self._turns[subject.base].take(subject.tenant_id), asyncio.timeout(_MEASURE_TIMEOUT_S):
                known = await self._find_measured(subject)
                return known or await self.judge.measure(subject.base, subject.digest, subject.rank, weights)
        except NoVerdictError as error:
            _log.info("no engine could measure %s now: %s", subject.digest, error.message)
            raise
        except TimeoutError:
            _log.warning("an engine did not finish to measure %s in %g s", subject.digest, _MEASURE_TIMEOUT_S)
            return None

    async def _find_measured(self, subject: _Subject) -> ParityResult | None:
        """Return what was measured of the same content on the weights that are registered now.

        Only of the same tenant: another one must not learn from the time that it takes who else has the content.
        """
        query = (
            sa.select(VersionRow.report)
            .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
            .join(BaseRow, BaseRow.id == AdapterRow.base_id)
            .where(VersionRow.digest == subject.digest, VersionRow.state == "ready")
            .where(AdapterRow.tenant_id == subject.tenant_id, BaseRow.name == subject.base)
            .where(VersionRow.weights_digest == BaseRow.weights_digest, BaseRow.weights_digest != "")
            .limit(1)
        )
        async with self._database.read() as session:
            report = (await session.execute(query)).scalar_one_or_none()
        result = None if report is None else msgspec.convert(report, Report).parity
        return result if isinstance(result, ParityResult) and result.is_within else None

    async def settle(self, version_id: uuid.UUID, outcome: Outcome) -> None:
        """Write the outcome of a version, unless it has left `validating` meanwhile.

        Raises:
            UnavailableError: The database does not answer.
        """

        async def work(change: Change) -> bool:
            version = await change.session.get(VersionRow, version_id)
            pending = None if version is None else read_pending(version.pending)
            if version is None or pending is None:
                # retired with its adapter, quarantined, or let through by another process meanwhile
                return False
            await self._write(change, version, pending, outcome)
            return True

        if await self._database.change(work):
            self.on_outcome(outcome.check.verdict)

    def _note(self, version: VersionRow, outcome: Outcome) -> None:
        """Write what was measured; only one that is right is bound to the weights that it was measured on."""
        version.report = msgspec.to_builtins(outcome.add_to(msgspec.convert(version.report, Report)))
        version.weights_digest = outcome.weights_digest

    async def _write(self, change: Change, version: VersionRow, pending: Pending, outcome: Outcome) -> None:
        by = pending.by(version.adapter.tenant_id, version.adapter.tenant)
        self._note(version, outcome)
        if outcome.is_fault:
            version_state.quarantine(change, version, by, "parity", outcome.check.message)
            return
        before = version_state.set_ready(change, version)
        await change.session.flush()
        is_live = await self._promote(change, version, pending)
        details = {"parity": outcome.check.verdict, "promoted": is_live}
        version_state.record_act(change, version, by, "adapter.version_validated", before, **details)


def _tell_nobody(verdict: str) -> None:
    """Nobody counts."""
