"""What shall be done with a version once the parity gate lets it through, as its row holds it until then."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loraplex_registry.wire.identity import Identity

Promote = Literal["auto", "always", "never"]


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """The promotion that the upload asked for, and who asked.

    `live_revision` is the revision of the alias `live` that was seen when the upload began, 0 if it was never set and
    None if the adapter has been another one since.
    """

    promote: Promote
    live_revision: int | None
    actor: str
    key_id: str
    request_id: str

    def by(self, tenant_id: str, tenant: str) -> Identity:
        """Return who asked, to record what becomes of it."""
        return Identity(
            role="tenant",
            tenant_id=tenant_id,
            tenant=tenant,
            scopes=(),
            key_id=self.key_id,
            actor=self.actor,
            request_id=self.request_id,
        )


def read_pending(pending: Any) -> Pending | None:
    """Return what a version's row holds."""
    return msgspec.convert(pending, Pending | None)
