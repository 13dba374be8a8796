"""The hold by which one request moves the models of an escalation, and what is left of one that was cut off.

Versions and aliases are moved before that is noted. A hold is named after the verb and the request, so that whoever
finds one that has lapsed knows what was begun, and by whom: it is done to the end, or taken back, before anything else.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.tables import escalation
from loraplex.errors import ConflictError
from loraplex.escalations.clock import build_clock_identity, is_held
from loraplex.escalations.machine import Verb
from loraplex.escalations.record import Row
from loraplex_registry.wire.identity import Identity

HOLD = timedelta(seconds=60)
"""Longer than any act on versions and aliases may take."""

_VERBS = ("register", "activate", "revert", "close")
_REQUEST = "req_"
_REQUEST_LEN = 26
_FAULTS = (None, "unavailable", "store_unavailable", "internal_error")
"""Codes of errors after which nobody knows whether something was moved; others say that nothing was."""

_event = sa.table("audit_event", *map(sa.column, ("id", "actor", "key_id", "request_id", "tenant_id")))


@dataclass
class Hold:
    """One that was taken: the escalation as it was then, and whether its models have been moved since."""

    name: str
    row: Row
    has_moved: bool = False

    def is_spent(self, error: BaseException) -> bool:
        """Whether nothing is left to finish after an error."""
        return not self.has_moved and getattr(error, "code", None) not in _FAULTS


class Begun(msgspec.Struct, frozen=True):
    """What somebody began and did not end."""

    verb: Verb
    request_id: str


def name_hold(verb: Verb, by: Identity) -> str:
    """Return a name that nobody else has, also for the same verb of the same request."""
    return f"{verb}:{by.request_id.removeprefix(_REQUEST)[:_REQUEST_LEN]}:{secrets.token_hex(2)}"


def find_begun(row: Row, now: datetime) -> Begun | None:
    """Return what is left of a hold that has lapsed, None if there is none."""
    verb, _, rest = (row["held_by"] or "").partition(":")
    if verb not in _VERBS or is_held(row, now):
        return None
    return Begun(cast("Verb", verb), _REQUEST + rest.rpartition(":")[0])


def check_unheld(row: Row, verb: Verb, now: datetime) -> None:
    """Return if nobody else is moving the models of an escalation, or has left them half moved by another verb.

    Raises:
        ConflictError: Somebody is or has.
    """
    if is_held(row, now):
        raise ConflictError("Another request is moving this escalation; look again in a moment", param="state")
    begun = find_begun(row, now)
    if begun is not None and begun.verb != verb:
        raise ConflictError(
            f"Its {begun.verb} was cut off and is being finished; look again in a moment", param="state"
        )


async def find_beginner(connection: AsyncConnection, row: Row, begun: Begun) -> Identity:
    """Return who began something, as far as the trail of what it moved tells; else the gateway, with the request."""
    gateway = msgspec.structs.replace(build_clock_identity(), request_id=begun.request_id)
    own = (_event.c.request_id == begun.request_id) & (_event.c.tenant_id == row["tenant_id"])
    query = sa.select(_event.c.actor, _event.c.key_id).where(own).order_by(_event.c.id).limit(1)
    found = (await connection.execute(query)).first()
    return gateway if found is None else msgspec.structs.replace(gateway, actor=found.actor, key_id=found.key_id)


async def set_hold(connection: AsyncConnection, row: Row, name: str, until: datetime) -> None:
    """Take a hold of a row that is locked."""
    values = {"held_by": name, "held_until": until}
    await connection.execute(sa.update(escalation).where(escalation.c.id == row["id"]).values(values))


async def give_back(connection: AsyncConnection, hold: Hold, lapses_at: datetime | None) -> None:
    """End a hold that is still ours; with `lapses_at` what was begun under it is left to be finished from then on."""
    own = (escalation.c.id == hold.row["id"]) & (escalation.c.held_by == hold.name)
    values = {"held_by": None, "held_until": None} if lapses_at is None else {"held_until": lapses_at}
    await connection.execute(sa.update(escalation).where(own).values(values))


def has_lapsed(now: datetime) -> sa.ColumnElement[bool]:
    """Rows that may have something left to finish."""
    return escalation.c.held_by.is_not(None) & (escalation.c.held_until <= now)
