"""What the terminal shows while the platform starts: one line per stage, with a spinner where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Stage:
    """A stage in progress; `detail` replaces the grey text behind its name."""

    def __init__(self, title: str, status: Status | None) -> None:
        self._title = title
        self._status = status
        self.result = ""

    def detail(self, text: str) -> None:
        """Show what the stage is doing."""
        if self._status:
            self._status.update(f"{self._title} [dim]{escape(text[:100])}[/dim]")


class Display:
    """Writes to one console, which is standard error in `loraplex up`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, title: str, *, spinner: bool = True) -> Iterator[Stage]:
        """Show a stage until the block ends, then its line with the seconds it took; no spinner where others print."""
        started_at = time.monotonic()
        if spinner and self._console.is_terminal:
            with self._console.status(title) as status:
                stage = Stage(title, status)
                yield stage
        else:
            stage = Stage(title, None)
            yield stage
        seconds = time.monotonic() - started_at
        result = f"  {escape(stage.result)}" if stage.result else ""
        self._console.print(f"[green]✓[/green] {title}{result}  [dim]{seconds:.1f} s[/dim]", highlight=False)

    def say(self, text: str) -> None:
        """Print a line of rich markup."""
        self._console.print(text, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning, as it stands."""
        self._console.print(f"[yellow]![/yellow] {escape(text)}", highlight=False)
