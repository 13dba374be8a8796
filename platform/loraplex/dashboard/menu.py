"""What stands in the menu, and for whom. Pages that a session may not see are not shown to it; their routes refuse."""

from __future__ import annotations

import msgspec

from loraplex_registry.wire.identity import Identity


class Entry(msgspec.Struct, frozen=True):
    """One page of the menu: who may see it is who has `scope`; None is everybody, `platform` are platform keys.

    `also_platform` shows it to them beside those who have the scope.
    """

    path: str
    title: str
    scope: str | None = None
    also_platform: bool = False

    def is_for(self, identity: Identity) -> bool:
        """Whether somebody may see the page."""
        if self.scope == "platform" or (self.also_platform and identity.is_platform):
            return identity.is_platform
        return self.scope is None or identity.has_scope(self.scope)
