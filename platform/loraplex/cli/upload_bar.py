"""What a terminal shows of an upload: hashed, sent, judged. Where no terminal is, only what went on from before."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from loraplex.cli.output import progress_bar, say


class UploadBar:
    """A bar that follows one upload; a `Watcher` of those in parts."""

    def __init__(self, name: str, *, is_silent: bool = False) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress: Progress = progress_bar(*columns, TimeRemainingColumn())
        self._task = self._progress.add_task(name, total=None)
        self._name = name
        self.is_silent = is_silent
        self.upload: str | None = None

    def __enter__(self) -> UploadBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def hashing(self, total: int) -> None:
        """Show that files of `total` bytes are read."""
        self._progress.reset(self._task, description=f"{self._name}: hashing", total=total)

    def sending(self, upload: str, total: int, received: int) -> None:
        """Show bytes that go out, beginning with those that are `received` already."""
        self.upload = upload
        if received and not self.is_silent:
            say(f"going on with {upload}: {show_size(received)} of {show_size(total)} have arrived")
        self._progress.reset(self._task, description=self._name, total=total, completed=received)

    def judging(self) -> None:
        """Show that the registry checks what it has."""
        self._progress.update(self._task, description=f"{self._name}: checked by the registry")

    def waiting(self, state: str) -> None:
        """Show that the version is not judged to its end."""
        self._progress.update(self._task, description=f"{self._name}: {state}")

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._progress.advance(self._task, count)


def show_size(count: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
