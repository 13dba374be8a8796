"""Why `loraplex up` could not start or go on; each message says what to do next.

UpError
    PortTakenError
    FolderInUseError
    PartFailedError
    StoppedError
"""

from __future__ import annotations


class UpError(Exception):
    """The platform could not start."""

    def __init__(self, message: str | None = None) -> None:
        self.message = message or " ".join((type(self).__doc__ or "").split())
        super().__init__(self.message)


class PortTakenError(UpError):
    """Another program listens on this port; choose another with --port."""


class FolderInUseError(UpError):
    """Another `loraplex up` uses this data folder; stop it, or choose another folder with --data-dir."""


class StoppedError(UpError):
    """Stopped before it was done."""

    exit_code = 130


class PartFailedError(UpError):
    """A part of the platform stopped while it started; its last lines say why."""
