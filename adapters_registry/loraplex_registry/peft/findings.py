"""The checks that one judgement has gathered so far.

`check_adapter` makes one `Findings` per adapter and hands it to each rule; the rules are its only writers. It keeps the
report short: at most `MAX_PER_NAME` findings under one check name, then a count.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.report import Check, Verdict

MAX_PER_NAME = 20
MAX_SHOWN = 80


def show(value: Any) -> str:
    """A JSON value as a message may hold it: printable ASCII, at most `MAX_SHOWN` characters."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def listed(names: list[str] | tuple[str, ...], limit: int = 8) -> str:
    """Names joined for a message, at most `limit` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..." for name in names[:limit]) + more


class Findings:
    """Gathers checks; a rule that has looked says so with `settle`."""

    def __init__(self) -> None:
        self._found: list[Check] = []
        self._settled: dict[str, None] = {}
        self._count: Counter[tuple[str, Verdict]] = Counter()

    def fail(self, name: str, message: str, subject: str) -> None:
        """Record that `subject` breaks the check `name`."""
        self._add(name, "fail", message, subject)

    def warn(self, name: str, message: str, subject: str) -> None:
        """Record something a team should see but that does not refuse the adapter."""
        self._add(name, "warn", message, subject)

    def fail_with(self, error: AdapterFileError) -> None:
        """Record what a reader raised."""
        self.fail(error.check, error.message, error.subject)

    def settle(self, *names: str) -> None:
        """Record that the named checks were made: each passes unless something is found under its name."""
        self._settled.update(dict.fromkeys(names))

    def has_failed(self, *names: str) -> bool:
        """Whether one of the named checks failed; without names, whether any did."""
        return any(check.verdict == "fail" and (not names or check.name in names) for check in self._found)

    def is_full(self, name: str) -> bool:
        """Whether further failures under this name are only counted, so that no message needs to be made."""
        return self._count[name, "fail"] >= MAX_PER_NAME

    def checks(self) -> list[Check]:
        """All checks, with one line for those left out."""
        found = {check.name for check in self._found}
        passed = [Check(name, "pass") for name in self._settled if name not in found]
        return passed + self._found + self._summaries()

    def _summaries(self) -> list[Check]:
        return [
            Check(name, verdict, f"{count - MAX_PER_NAME} more findings of this kind are left out.")
            for (name, verdict), count in self._count.items()
            if count > MAX_PER_NAME
        ]

    def _add(self, name: str, verdict: Verdict, message: str, subject: str) -> None:
        self._count[name, verdict] += 1
        if self._count[name, verdict] <= MAX_PER_NAME:
            self._found.append(Check(name, verdict, message, subject[:512]))
