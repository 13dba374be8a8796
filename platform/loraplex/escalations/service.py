"""Moves escalations: each verb is checked, done to the models, and then noted with its history and its event.

`EscalationService` is the only writer of escalations. What a verb does to versions and aliases is another part's, in
another transaction, and may be repeated: it is done before it is noted. While it is done the escalation is held, for a
minute at most, and no other request moves its models; a hold that lapses shows what is left to `finish`. Knows no HTTP
and no engines.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.idempotency import Answer, IdempotencyKeys, hash_content
from loraplex.db.tables import escalation
from loraplex.errors import ConflictError, InvalidRequestError, NoReplicaError, UnavailableError
from loraplex.escalations.act import Approval, EscalationOpening, Registration
from loraplex.escalations.amount import check_currency, show_amount, to_cents
from loraplex.escalations.clock import as_of, is_in_state, let_clock_run, may_be_due
from loraplex.escalations.four_eyes import KeyHolder, check_four_eyes, find_holder, has_other_admin
from loraplex.escalations.hold import (
    HOLD,
    Begun,
    Hold,
    check_unheld,
    find_beginner,
    find_begun,
    give_back,
    has_lapsed,
    name_hold,
    set_hold,
)
from loraplex.escalations.machine import OPEN_STATES, Verb, find_due, move
from loraplex.escalations.opening import build_row, end_expired
from loraplex.escalations.port import Models, Pools
from loraplex.escalations.record import (
    EscalationView,
    Row,
    WholeEscalationView,
    get_row,
    list_history,
    read_course,
    show,
    show_time,
    show_whole,
    write_history,
    write_step,
)
from loraplex_registry.wire.identity import Identity

_OPENED = 201
_FINISHED = "Finished by the platform: it was begun, and cut off before it was noted."
_Values = dict[str, Any]
_Note = Callable[[AsyncConnection, Row, datetime], Awaitable[tuple[_Values, _Values]]]
"""Judges a locked row once more, and returns columns to set and details for the history."""


class EscalationService:
    """Escalations of all tenants."""

    def __init__(self, database: Database, models: Models, pools: Pools) -> None:
        self._database = database
        self._models = models
        self._pools = pools
        self._keys = IdempotencyKeys(database)

    async def open(self, by: Identity, wanted: EscalationOpening, idempotency_key: str | None) -> Answer:
        """Open an escalation for an adapter of the target tenant of `by`, and return the answer.

        Raises:
            InvalidRequestError: The evidence shows nothing to escalate.
            ConflictError: The adapter has an open escalation, or the Idempotency-Key is in use.
            IdempotencyReusedError: The key was used for something else.
        """
        content = hash_content([by.target_tenant, wanted])
        claim = await self._keys.claim(by, "POST escalations", idempotency_key, content)
        if claim.answer is not None:
            return claim.answer
        try:
            row = await build_row(self._database, self._models, by, wanted)
            async with self._database.write() as connection:
                await end_expired(connection, row["adapter_id"], row["created_at"])
                await connection.execute(escalation.insert(), row)
                details = {} if wanted.reason is None else {"reason": wanted.reason}
                await write_history(connection, row, "open", None, by, row["created_at"], details)
                view = show_whole(row, await list_history(connection, row["id"]), row["created_at"])
                answer = Answer(_OPENED, msgspec.json.encode(view))
                await self._keys.finish(connection, claim, answer)
        except BaseException as error:
            await self._keys.release(claim)
            if isinstance(error, IntegrityError):
                raise ConflictError("This adapter has an open escalation; close that first", param="adapter") from error
            raise
        return answer

    async def get(self, by: Identity, public_id: str) -> WholeEscalationView:
        """Return one escalation.

        Raises:
            NotFoundError: There is none that the caller may see.
        """
        now = datetime.now(UTC)
        async with self._database.read() as connection:
            row = await get_row(connection, public_id, _scope_of(by))
            return show_whole(as_of(row, now), await list_history(connection, row["id"]), now)

    async def list_all(
        self, by: Identity, tenant_id: str | None, state: str | None, before: uuid.UUID | None, limit: int
    ) -> list[tuple[uuid.UUID, EscalationView]]:
        """Return up to `limit` escalations with their keys, newest first, older than `before`."""
        now = datetime.now(UTC)
        query = sa.select(escalation).order_by(escalation.c.id.desc()).limit(limit)
        for wanted in (tenant_id, _scope_of(by)):
            if wanted is not None:
                query = query.where(escalation.c.tenant_id == wanted)
        if state is not None:
            query = query.where(is_in_state(state, now))
        if before is not None:
            query = query.where(escalation.c.id < before)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [(row["id"], show(as_of(dict(row), now), now)) for row in rows]

    async def approve(self, by: Identity, public_id: str, wanted: Approval) -> WholeEscalationView:
        """Agree to a full fine-tune: who owns it, why, for how much, and until when nobody need look at it again.

        Raises:
            PermissionDeniedError: Whoever asked for it would approve it.
        """
        budget_cents = to_cents(wanted.budget_per_month, "budget_per_month")
        currency = check_currency(wanted.currency)

        async def note(connection: AsyncConnection, row: Row, now: datetime) -> tuple[_Values, _Values]:
            await _check_other_eyes(connection, row, by)
            details = {
                "owner": wanted.owner,
                "justification": wanted.justification,
                "budget_per_month": show_amount(budget_cents),
                "currency": currency,
                "review_at": show_time(wanted.review_at),
                "on_overdue": wanted.on_overdue,
            }
            approved = {"justification": wanted.justification, "approved_by": by.actor, "approved_key": by.key_id}
            values = {
                "approval": approved | {"approved_at": show_time(now)},
                "owner": wanted.owner,
                "budget_cents": budget_cents,
                "currency": currency,
            }
            return values, details

        dates = {"review_at": wanted.review_at, "on_overdue": wanted.on_overdue}
        return await self._note(by, public_id, "approve", note, dates=dates)

    async def reject(self, by: Identity, public_id: str, reason: str) -> WholeEscalationView:
        """Say no."""
        return await self._note(by, public_id, "reject", _tell({"reason": reason}))

    async def extend(
        self, by: Identity, public_id: str, review_at: datetime, reason: str | None
    ) -> WholeEscalationView:
        """Move the review date."""
        details = {"review_at": show_time(review_at), "reason": reason}
        return await self._note(by, public_id, "extend", _tell(details), dates={"review_at": review_at})

    async def register(self, by: Identity, public_id: str, wanted: Registration) -> WholeEscalationView:
        """Bind the full fine-tune: the pool that serves it, the digest of its files, its cost a month.

        Raises:
            InvalidRequestError: No operator has configured the pool, or the cost is above the budget.
            ConflictError: The pool serves another full fine-tune.
        """
        self._pools.check_pool(wanted.pool)
        async with self._holding(by, public_id, "register") as hold:
            row = hold.row
            cost_cents = _choose_cost(row, wanted.cost_per_month)
            version = await self._models.register_full(
                _aim(by, row), row["adapter"], public_id, wanted.pool, wanted.digest
            )
            hold.has_moved = True
            values = {"pool": wanted.pool, "full_version": version.version, "full_digest": version.digest}
            details = {
                "pool": wanted.pool,
                "digest": version.digest,
                "version": version.version,
                "cost_per_month": show_amount(cost_cents),
            }
            note = _tell(details, values | {"cost_cents": cost_cents})
            return await self._note(by, public_id, "register", note, hold=hold)

    async def activate(
        self, by: Identity, public_id: str, wait_s: float, reason: str | None = None
    ) -> WholeEscalationView:
        """Let the adapter's name mean the full fine-tune, once its pool serves it.

        Raises:
            NoReplicaError: No replica of the pool serves it after `wait_s` seconds.
        """
        row = await self._look(by, public_id, "activate")
        await self._pools.wait_ready(row["pool"], row["full_digest"], wait_s)
        async with self._holding(by, public_id, "activate") as hold:
            _, replaced = await self._models.activate_full(_aim(by, hold.row), hold.row["adapter"], public_id)
            hold.has_moved = True
            note = _tell({"replaced": msgspec.to_builtins(replaced.targets), "reason": reason})
            return await self._note(by, public_id, "activate", note, hold=hold)

    async def revert(self, by: Identity, public_id: str, reason: str | None) -> WholeEscalationView:
        """Let the adapter's name mean again what it meant before."""
        async with self._holding(by, public_id, "revert") as hold:
            await self._models.revert_full(_aim(by, hold.row), hold.row["adapter"], public_id)
            hold.has_moved = True
            return await self._note(by, public_id, "revert", _tell({"reason": reason}), hold=hold)

    async def close(self, by: Identity, public_id: str, reason: str | None) -> WholeEscalationView:
        """End it: what was live before is live again, and nobody can call the full fine-tune any more.

        Raises:
            ConflictError: An alias points to the full fine-tune, besides what the escalation has set.
        """
        async with self._holding(by, public_id, "close") as hold:
            await self._models.withdraw_full(_aim(by, hold.row), hold.row["adapter"], public_id)
            hold.has_moved = True
            return await self._note(by, public_id, "close", _tell({"reason": reason}), hold=hold)

    async def list_due(self) -> list[Row]:
        """Return the rows of all with which the clock has something to do.

        Raises:
            UnavailableError: The database does not answer.
        """
        async with self._database.read() as connection:
            query = sa.select(escalation).where(may_be_due(datetime.now(UTC)))
            return [dict(row) for row in (await connection.execute(query)).mappings()]

    async def do_due(self, by: Identity, public_id: str) -> None:
        """Expire an escalation, mark it as overdue, or revert it where that was agreed: whatever is due."""
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            row = await get_row(connection, public_id, None, locks=True)
            row = await let_clock_run(connection, row, now)
        if find_due(read_course(row), now) == "revert":
            await self.revert(by, public_id, "Nobody reviewed it in time.")

    async def list_unfinished(self) -> list[str]:
        """Return the ids of those that somebody began to move and left so.

        Raises:
            UnavailableError: The database does not answer.
        """
        now = datetime.now(UTC)
        async with self._database.read() as connection:
            rows = (await connection.execute(sa.select(escalation).where(has_lapsed(now)))).mappings()
            return [row["public_id"] for row in rows if find_begun(dict(row), now) is not None]

    async def finish(self, public_id: str) -> None:
        """Do to its end what somebody began and left, or take it back where it cannot be done any more.

        A registration is always taken back, as what it would have cost is not known. The history names whoever began.
        """
        async with self._database.read() as connection:
            row = await get_row(connection, public_id, None)
            begun = find_begun(row, datetime.now(UTC))
            if begun is None:
                return
            by = await find_beginner(connection, row, begun)
        try:
            match begun.verb:
                case "revert":
                    await self.revert(by, public_id, _FINISHED)
                case "close":
                    await self.close(by, public_id, _FINISHED)
                case "activate":
                    await self.activate(by, public_id, 0.0, _FINISHED)
        except (ConflictError, NoReplicaError):
            pass
        await self._take_back(by, public_id, begun)

    async def _take_back(self, by: Identity, public_id: str, begun: Begun) -> None:
        """Make versions and aliases what the state says, if what was begun is still left."""
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            row = await get_row(connection, public_id, None, locks=True)
            if find_begun(row, now) != begun:
                return
            hold = Hold(name_hold(begun.verb, by), row)
            await set_hold(connection, row, hold.name, now + HOLD)
        async with self._keeping(hold):
            is_registered = as_of(row, now)["state"] == "registered"
            undo = self._models.revert_full if is_registered else self._models.withdraw_full
            await undo(_aim(by, row), row["adapter"], public_id)
            async with self._database.write() as connection:
                await give_back(connection, hold, None)

    async def list_open(self) -> list[Row]:
        """Return the rows of all open escalations."""
        query = sa.select(escalation).where(escalation.c.state.in_(OPEN_STATES))
        async with self._database.read() as connection:
            return [dict(row) for row in (await connection.execute(query)).mappings()]

    async def sweep(self) -> None:
        """Forget old Idempotency-Keys."""
        await self._keys.sweep()

    async def _look(self, by: Identity, public_id: str, verb: Verb) -> Row:
        """Return an escalation of which `verb` is possible now."""
        async with self._database.read() as connection:
            row = await get_row(connection, public_id, _scope_of(by))
        return _check_possible(row, verb, datetime.now(UTC))

    @asynccontextmanager
    async def _holding(self, by: Identity, public_id: str, verb: Verb) -> AsyncIterator[Hold]:
        """Yield the hold of an escalation of which `verb` is possible, by which nobody else moves its models.

        The step that is noted under the hold ends it.

        Raises:
            ConflictError: Another request moves them just now, or has left them half moved.
        """
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            row = await get_row(connection, public_id, _scope_of(by), locks=True)
            row = _check_possible(row, verb, now)
            check_unheld(row, verb, now)
            hold = Hold(name_hold(verb, by), row)
            await set_hold(connection, row, hold.name, now + HOLD)
        async with self._keeping(hold):
            yield hold

    @asynccontextmanager
    async def _keeping(self, hold: Hold) -> AsyncIterator[None]:
        """Leave what fails half-way to be finished; a refusal that moved nothing ends the hold."""
        try:
            yield
        except BaseException as error:
            lapses_at = None if hold.is_spent(error) else datetime.now(UTC)
            # if the database is away the hold lapses by itself
            with contextlib.suppress(UnavailableError):
                async with self._database.write() as connection:
                    await give_back(connection, hold, lapses_at)
            raise

    async def _note(
        self,
        by: Identity,
        public_id: str,
        verb: Verb,
        note: _Note,
        *,
        hold: Hold | None = None,
        dates: _Values | None = None,
    ) -> WholeEscalationView:
        """Move an escalation in one transaction.

        Raises:
            ConflictError: The state does not allow it, or the hold was lost.
        """
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            row = await get_row(connection, public_id, _scope_of(by), locks=True)
            if hold is not None and row["held_by"] != hold.name:
                raise ConflictError("This took too long; look at the escalation before you repeat it", param="state")
            row = await let_clock_run(connection, row, now)
            course = move(read_course(row), verb, now, **(dates or {}))
            values, details = await note(connection, row, now)
            if hold is not None:
                values = values | {"held_by": None, "held_until": None}
            row = await write_step(connection, row, verb, course, by, now, values=values, details=details)
            return show_whole(row, await list_history(connection, row["id"]), now)


def _check_possible(row: Row, verb: Verb, now: datetime) -> Row:
    """Return a row as the clock has it.

    Raises:
        ConflictError: `verb` leads nowhere from there.
    """
    row = as_of(row, now)
    move(read_course(row), verb, now)
    return row


def _scope_of(by: Identity) -> str | None:
    """The only tenant whose escalations the caller may see; None sees all."""
    return None if by.is_platform else by.tenant_id


def _aim(by: Identity, row: Row) -> Identity:
    return msgspec.structs.replace(by, target_tenant_id=row["tenant_id"], target_tenant=row["tenant"], limits=None)


def _tell(details: _Values, values: _Values | None = None) -> _Note:
    """What is told of a step, and set with it, as they are known before."""

    async def note(connection: AsyncConnection, row: Row, now: datetime) -> tuple[_Values, _Values]:  # noqa: ARG001
        return values or {}, {name: value for name, value in details.items() if value is not None}

    return note


def _choose_cost(row: Row, cost_per_month: float | None) -> int:
    """Return cents: what was approved, unless it is less."""
    budget_cents: int = row["budget_cents"]
    cost_cents = budget_cents if cost_per_month is None else to_cents(cost_per_month, "cost_per_month")
    if cost_cents > budget_cents:
        raise InvalidRequestError(
            f"cost_per_month is above the approved budget of {show_amount(budget_cents)} {row['currency']}",
            param="cost_per_month",
        )
    return cost_cents


async def _check_other_eyes(connection: AsyncConnection, row: Row, by: Identity) -> None:
    requester = KeyHolder(row["requested_key"], row["requested_by"], row["requested_issuer"])
    approver = await find_holder(connection, by.key_id, by.actor)
    is_accompanied = approver.is_bootstrap and await has_other_admin(connection, by.key_id)
    check_four_eyes(requester, approver, has_other_admin=is_accompanied)
