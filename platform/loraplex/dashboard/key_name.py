"""Which key acted, as people call it: its name, and whose it is. An actor is the key's owner, who may have many.

Names come from the keys in memory; a tenant is told those of its own keys alone.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from loraplex.audit.trail import EventQuery, list_events
from loraplex.dashboard.parts import Parts
from loraplex.gateway.directory import Directory
from loraplex_registry.wire.identity import Identity

_CREATED = "adapter.version_created"
# an event is written with what it tells of; its time is taken a moment apart
_APART = timedelta(minutes=1)


def name_key(directory: Directory, key_id: str, identity: Identity) -> str | None:
    """Return `NAME (TENANT)`, with `platform` for a key of no tenant; None for what is no key, or not to be told."""
    key = directory.find_key_by_id(key_id)
    if key is None:
        return None
    is_own = key.role == "tenant" and str(key.tenant_id) == identity.tenant_id
    if not (identity.is_platform or is_own):
        return None
    tenant = "platform" if key.role != "tenant" or key.tenant_id is None else directory.get_tenant(key.tenant_id).name
    return f"{key.name} ({tenant})"


async def find_maker(parts: Parts, identity: Identity, version: str, created_at: str) -> str | None:
    """Return the name of the key that a version was uploaded with, of which an event tells; None if none does."""
    at = datetime.fromisoformat(created_at)
    wanted = EventQuery(action=_CREATED, subject=version, start=at - _APART, stop=at + _APART)
    events = await list_events(parts.database, wanted, None, 1)
    return name_key(parts.directory, events[0]["key_id"], identity) if events else None
