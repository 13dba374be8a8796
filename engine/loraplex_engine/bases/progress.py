"""What a pull tells the person who waits: stages with bytes done, and notes."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class PullProgress(Protocol):
    """Receives the course of one pull; no method may raise."""

    def begin(self, label: str, total_bytes: int | None = None) -> None:
        """Start the next stage; the one before it is done."""

    def advance(self, num_bytes: int) -> None:
        """Count bytes of the current stage."""

    def note(self, text: str) -> None:
        """Say one sentence beside the stages."""


class NoProgress:
    """Says nothing."""

    def begin(self, label: str, total_bytes: int | None = None) -> None:
        """Ignored."""

    def advance(self, num_bytes: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""


class RichProgress:
    """A bar on standard error; one line a stage where that is not a terminal. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stage: TaskID | None = None

    def begin(self, label: str, total_bytes: int | None = None) -> None:
        """Show a new bar."""
        self._finish()
        if not self._console.is_terminal:
            self.note(label)
        self._stage = self._bars.add_task(label, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Move the bar."""
        if self._stage is not None:
            self._bars.advance(self._stage, num_bytes)

    def note(self, text: str) -> None:
        """Print above the bars."""
        self._console.print(text, markup=False, highlight=False)

    def _finish(self) -> None:
        if self._stage is None:
            return
        done = self._bars.tasks[-1].completed
        self._bars.update(self._stage, total=done or 1, completed=done or 1)

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._bars.stop()
