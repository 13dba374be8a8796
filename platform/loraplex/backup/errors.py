"""Why a backup could not be made, read or restored; each message says what to do next.

BackupError
    NotWholeError
    NewerError
    UnsupportedPlaceError
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_registry.wire.fault import Fault


class BackupError(Exception):
    """The backup could not be made or read."""

    def __init__(self, message: str | None = None) -> None:
        self.message = message or " ".join((type(self).__doc__ or "").split())
        super().__init__(self.message)


class NotWholeError(BackupError):
    """The backup is not whole; take another one."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = faults
        first = "\n".join(f"  {fault.kind}: {fault.subject}: {fault.message}" for fault in faults[:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        super().__init__(f"The backup is not whole. Take another one.\n{first}{more}")


class NewerError(BackupError):
    """The backup was made by a newer program; restore it with that one, or a newer one."""


class UnsupportedPlaceError(BackupError):
    """This command copies SQLite and a folder; Postgres and buckets have means of their own, the database first."""
