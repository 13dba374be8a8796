"""Named and timed steps of the checks before a release; the first that fails ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "build" / "tools" / "bin"
_TAIL_LINES = 25


class StepError(Exception):
    """A step failed; the message says why."""


@contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Print one line when the step is done, with what it adds to the list; a failure ends the program."""
    facts: list[str] = []
    began_at = time.monotonic()
    try:
        yield facts
    except StepError as error:
        print(f"FAILED        {name}\n{error}", flush=True)
        sys.exit(1)
    text = "".join(f"; {fact}" for fact in facts)
    print(f"ok {time.monotonic() - began_at:8.1f} s  {name}{text}", flush=True)


def run(*argv: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout_s: float = 1800) -> str:
    """Return what a program printed.

    Raises:
        StepError: It did not end with 0 in time.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
        raise StepError(f"{' '.join(words)} ended with {done.returncode}:\n{tail}")
    return done.stdout


def require(holds: bool, message: str) -> None:
    """Raise StepError unless it holds."""
    if not holds:
        raise StepError(message)


def read_version() -> str:
    """Return the version of the source."""
    text = (ROOT / "platform/loraplex/version.py").read_text(encoding="utf-8")
    return text.split('__version__ = "', 1)[1].split('"', 1)[0]


def build_outside_environment(**more: str) -> dict[str, str]:
    """Return an environment without what would lead to the checkout, its .venv or somebody's settings."""
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder).is_relative_to(ROOT)
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "LORAPLEX_", "VIRTUAL_ENV")) or name == "LORAPLEX_CACHE_DIR"
    }
    return kept | {"PATH": path} | more


def list_lines(words: Sequence[str], limit: int = 12) -> str:
    """Return the first of many words, one a line."""
    more = [f"... and {len(words) - limit} more"] if len(words) > limit else []
    return "\n".join([*words[:limit], *more])
