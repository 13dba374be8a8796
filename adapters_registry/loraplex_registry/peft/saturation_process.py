"""The process that measures one adapter's saturation: a job as JSON on standard input, the figures on standard output.

It bounds itself before it looks at a file, so that no tensor takes the memory or the time of whoever asked.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import msgspec

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.file_rule import WEIGHTS_FILE
from loraplex_registry.peft.limit import address_space_bytes, die_with_parent
from loraplex_registry.peft.saturation import Saturation, measure_adapter
from loraplex_registry.peft.spec import BaseSpec

MAX_MEMORY_BYTES = 3 << 30
"""Beyond what the process has at its start: the largest tensor, once more in float64, and its decomposition."""
MAX_CPU_S = 120


class SaturationJob(msgspec.Struct, frozen=True):
    """The stored files by name, the base that they were judged against, and the digest that they must have."""

    files: dict[str, str]
    base: BaseSpec
    digest: str


class SaturationAnswer(msgspec.Struct, frozen=True):
    """The figures, or in one sentence why there are none."""

    saturation: Saturation | None = None
    problem: str | None = None


def answer_job(job: SaturationJob) -> SaturationAnswer:
    """Measure in this process."""
    files = {name: Path(path) for name, path in job.files.items()}
    # who uploaded it was judged then; what it is must still be so
    _, plan = check_adapter(files, job.base, forced_base=True, renders_template=False)
    if plan is None or plan.digest != job.digest:
        return SaturationAnswer(problem="The stored files are not those that were uploaded; tell an admin.")
    if not plan.modules:
        return SaturationAnswer(problem="The adapter has no LoRA modules, so there is no rank to measure.")
    with files[WEIGHTS_FILE].open("rb") as file:
        try:
            return SaturationAnswer(measure_adapter(plan, file.fileno()))
        except AdapterFileError as error:
            return SaturationAnswer(problem=str(error))


def limit_resources() -> None:
    """Bound this process, and what it starts."""
    for kind, limit in (
        (resource.RLIMIT_AS, address_space_bytes() + MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        # not every system knows every limit, and a lower one may hold already
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def main() -> int:
    """Answer one job."""
    die_with_parent()
    limit_resources()
    with contextlib.suppress(OSError):
        os.nice(10)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SaturationJob)
    sys.stdout.buffer.write(msgspec.json.encode(answer_job(job)))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
