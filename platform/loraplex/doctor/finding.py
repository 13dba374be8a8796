"""What a check finds, and how checks run: side by side, each for so long at most, and none stops another.

A check is a generator of findings. What it has found is kept where it then hangs or breaks; a thread that hangs ends
with the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail", "skip"]
_SLOW_S = 0.02
_INVALID_SETTING = "invalid_setting"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at; `remedy` says what to do where it is not `ok`."""

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""
    subject: str = ""


@dataclass
class Check:
    """What is looked at under one name.

    `find` yields findings. `remedy` is for where it does not end within `limit_s` seconds.
    """

    name: str
    find: Callable[[], Iterator[Finding]]
    limit_s: float
    remedy: str = ""
    _found: list[Finding] = field(default_factory=list)
    _is_done: bool = False

    def run(self) -> None:
        """Collect what is found, to its end."""
        try:
            for finding in self.find():
                self._found.append(finding)
        except Exception as error:  # noqa: BLE001 - one check that breaks must not stop the others
            self._found.append(self._explain(error))
        self._is_done = True

    def _explain(self, error: Exception) -> Finding:
        """Return what it means that the check ended early."""
        if getattr(error, "code", None) == _INVALID_SETTING:
            return Finding(self.name, "skip", "A setting that it needs is not valid: `settings.values` says which.")
        message = error.strerror if isinstance(error, OSError) else getattr(error, "message", None)
        if message:
            return Finding(self.name, "fail", str(message), self.remedy)
        # what a library says may quote a part of what it was given, a password among it
        return Finding(self.name, "fail", f"The check itself broke ({type(error).__name__}).", "Report it.")

    def collect(self) -> list[Finding]:
        """Return what is found by now, and that it hangs if it is not done."""
        is_done, found = self._is_done, list(self._found)
        if is_done:
            return found
        return [*found, Finding(self.name, "fail", f"No answer within {self.limit_s:g} s.", self.remedy)]


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """Run all checks at once and return their findings in the order of the checks."""
    began_at = time.monotonic()
    threads = [Thread(target=check.run, name=check.name, daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    findings = []
    for check, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, began_at + check.limit_s - time.monotonic()))
        findings += check.collect()
    return findings


def judge_latency(check: str, seconds: float, remedy: str) -> Finding:
    """Return what a round trip of so many seconds means."""
    shown = f"A round trip takes {seconds * 1000:.1f} ms."
    return Finding(check, "ok", shown) if seconds < _SLOW_S else Finding(check, "warn", shown, remedy)


def judge_clock(check: str, ahead_s: float, *, whose: str, warn_s: float, fail_s: float, why: str) -> Finding:
    """Return what a clock that is `ahead_s` seconds before this machine's means."""
    if abs(ahead_s) < warn_s:
        return Finding(check, "ok", f"{whose} agrees with this machine's (within {warn_s:g} s).")
    verdict: Verdict = "fail" if abs(ahead_s) >= fail_s else "warn"
    direction = "ahead of" if ahead_s > 0 else "behind"
    remedy = "Synchronise both clocks with NTP (chronyd, systemd-timesyncd)."
    return Finding(check, verdict, f"{whose} is {abs(ahead_s):.0f} s {direction} this machine's: {why}.", remedy)
