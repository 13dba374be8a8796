"""How a version's state changes: the row, the epoch of its adapter and the event, together. It judges nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from loraplex_registry.adapters.view import show_time
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import VersionRow
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import Quarantine, QuarantineReason
from loraplex_registry.wire.identity import Identity


def set_ready(change: Change, version: VersionRow) -> dict[str, Any]:
    """Make a version ready and return what it was, for `record_act`."""
    before = _leave(change, version, "ready")
    version.retired_at = None
    return before


def make_ready(change: Change, version: VersionRow, by: Identity, action: str, **details: Any) -> None:
    """Make a version ready and record the act."""
    record_act(change, version, by, action, set_ready(change, version), **details)


def quarantine(change: Change, version: VersionRow, by: Identity, reason: QuarantineReason, message: str) -> None:
    """Take a version out of service and record the act."""
    before = _leave(change, version, "quarantined")
    found = Quarantine(reason=reason, message=message, since=show_time(datetime.now(UTC)))
    version.quarantine = msgspec.to_builtins(found)
    record_act(change, version, by, "adapter.version_quarantined", before, reason=reason, message=message)


def retire(change: Change, version: VersionRow, by: Identity) -> None:
    """Retire a version and record the act; one that was quarantined keeps why."""
    found = version.quarantine
    before = _leave(change, version, "retired")
    version.retired_at, version.quarantine = datetime.now(UTC), found
    record_act(change, version, by, "adapter.version_retired", before)


def restore(change: Change, version: VersionRow, by: Identity) -> None:
    """Give a retired version back the state it was retired from, ready or quarantined, and record the act."""
    found = version.quarantine
    before = set_ready(change, version)
    if found is not None:
        version.state, version.quarantine = "quarantined", found
    record_act(change, version, by, "adapter.version_restored", before)


def purge(change: Change, version: VersionRow, by: Identity) -> None:
    """Mark a version's bytes as gone and record the act; whoever sweeps the store removes them."""
    before = _leave(change, version, "purged")
    # one that was quarantined when its adapter was deleted has none
    version.retired_at = version.retired_at or datetime.now(UTC)
    record_act(change, version, by, "adapter.version_purged", before)


def record_act(
    change: Change, version: VersionRow, by: Identity, action: str, before: dict[str, Any], **details: Any
) -> None:
    """Record an act on a version that has left the state `before`."""
    record_event(
        change.session,
        by,
        action,
        f"{version.adapter.tenant}/{version.adapter.name}@{version.number}",
        tenant_id=version.adapter.tenant_id,
        tenant=version.adapter.tenant,
        before=before,
        after={"state": version.state},
        details={"digest": version.digest, **details},
    )


def _leave(change: Change, version: VersionRow, state: str) -> dict[str, Any]:
    """Give up what belongs to the state that the version leaves, and return that state."""
    before = {"state": version.state}
    version.adapter.changed_epoch = change.epoch
    version.state, version.quarantine, version.pending = state, None, None
    return before
