"""Judges one upload in a process of its own: a job from standard input, the verdict to standard output.

Started as `python -m loraplex_registry.uploads.check_process`. Hostile files meet limits of memory, time and open
files here, never the event loop and never a secret.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import msgspec

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.report import Report
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec

_MAX_MEMORY_BYTES = 4 << 30
_MAX_CPU_S = 300
_MAX_OPEN_FILES = 128


class CheckJob(msgspec.Struct, frozen=True):
    """The files to judge by name, their base, and whether an admin forced it."""

    files: dict[str, str]
    base: BaseSpec
    forced_base: bool


class Verdict(msgspec.Struct, frozen=True):
    """What `check_adapter` returned."""

    report: Report
    plan: AdapterPlan | None


def judge(job: CheckJob) -> Verdict:
    """Judge the files of a job in this process."""
    files = {name: Path(path) for name, path in job.files.items()}
    return Verdict(*check_adapter(files, job.base, forced_base=job.forced_base))


def _limit_resources() -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, _MAX_CPU_S),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        # Not every system knows every limit, and a lower one may hold already.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Judge the job on standard input."""
    _limit_resources()
    # Whatever else is printed goes to the log, never into the verdict.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckJob)
        answer.write(msgspec.json.encode(judge(job)))


if __name__ == "__main__":
    main()
