"""The registry as the one who acts: what it does by itself is recorded under the name of its part."""

from __future__ import annotations

from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id


def build_agent(actor: str) -> Identity:
    """Return the identity under which a part of the registry changes something, with a request id of its own."""
    return Identity(
        role="admin",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="registry",
        actor=actor,
        request_id=new_public_id("req"),
    )
