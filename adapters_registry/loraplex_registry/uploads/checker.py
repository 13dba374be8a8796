"""Runs checks beside the event loop: at most a few at once, each in a process that is killed when its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from loraplex_registry.errors import UnavailableError
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.uploads.check_process import CheckJob, Verdict

_MODULE = "loraplex_registry.uploads.check_process"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
_log = logging.getLogger(__name__)


class Checker(Protocol):
    """Judges the files of an upload; changes nothing."""

    async def check(self, files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool, timeout_s: float) -> Verdict:
        """Return the verdict.

        Raises:
            UnavailableError: There is none after `timeout_s` seconds, waiting for a turn included.
        """


class ProcessChecker:
    """Judges in a process each, at most `max_checks` at once."""

    def __init__(self, max_checks: int) -> None:
        self._turns = asyncio.Semaphore(max_checks)

    async def check(self, files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool, timeout_s: float) -> Verdict:
        """Return the verdict (see `Checker.check`); files that end the process are refused."""
        job = msgspec.json.encode(build_job(files, base, forced_base=forced_base))
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                code, answer, complaint = await _run(job)
        except TimeoutError as error:
            raise _late(timeout_s) from error
        except OSError as error:
            raise UnavailableError(f"no process can be started to check the files: {error}") from error
        if code == 0:
            return msgspec.json.decode(answer, type=Verdict)
        _log.warning("a check ended with %s: %s", code, complaint[-2000:].decode(errors="replace"))
        check = Check(
            "format", "fail", "The files cannot be read within the limits of the checks; save them again.", "files"
        )
        return Verdict(build_report([check]), None)


def build_job(files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool) -> CheckJob:
    """Return what a process is told to judge."""
    return CheckJob({name: str(path) for name, path in files.items()}, base, forced_base)


def _late(timeout_s: float) -> UnavailableError:
    return UnavailableError(
        f"There is no verdict after {timeout_s:g} s and nothing was stored; repeat with a longer ?wait="
    )


async def _run(job: bytes) -> tuple[int, bytes, bytes]:
    """Run the process on `job` and return its code and outputs; it does not outlive this call."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        _MODULE,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=_environment(),
        start_new_session=True,
    )
    try:
        answer, complaint = await process.communicate(job)
    finally:
        if process.returncode is None:
            # The group: a check may have started a helper.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    assert process.returncode is not None
    return process.returncode, answer, complaint


def _environment() -> dict[str, str]:
    """Return no more than Python needs: hostile files never meet a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
