"""The acts that events tell of, `KIND.WHAT_WAS_DONE`, whichever part writes them: data, and the judge of a name."""

from __future__ import annotations

from loraplex.errors import InvalidRequestError

# fmt: off
_KIND_TO_ACTS = {
    "adapter": (
        "deleted", "limits_set", "made_default", "refused", "version_created", "version_purged", "version_quarantined",
        "version_released", "version_repeated", "version_restored", "version_retired", "version_validated",
    ),
    "alias": ("delete", "rollback", "set", "upload"),
    "base": ("names_added", "rank_limit_changed", "registered", "weights_changed"),
    "escalation": (
        "activated", "approved", "closed", "expired", "extended", "opened", "overdue", "registered", "rejected",
        "reverted",
    ),
    "fleet": (
        "adapter_dropped", "adapter_loaded", "adapter_pinned", "adapter_unpinned", "alias_mended", "load_retried",
        "pin_ignored", "repair_failed", "replica_back", "replica_lost", "replica_refused", "replica_removed",
    ),
    "key": ("changed", "created", "revoked", "rotated"),
    "request": ("answered", "open"),
    "session": ("closed", "opened"),
    "tenant": ("changed", "created", "deleted"),
}
# fmt: on
ACTIONS = frozenset(f"{kind}.{act}" for kind, acts in _KIND_TO_ACTS.items() for act in acts)


def check_action(text: str) -> str:
    """Return the name of an act that there is.

    Raises:
        InvalidRequestError: There is none; the message lists those of its kind, or all.
    """
    if text in ACTIONS:
        return text
    kind = text.partition(".")[0]
    known = sorted(name for name in ACTIONS if kind not in _KIND_TO_ACTS or name.startswith(f"{kind}."))
    raise InvalidRequestError(f"There is no action of that name; there are {', '.join(known)}", param="action")
