"""The checks that one judgement has gathered so far.

`check_adapter` makes one `Findings` per adapter and hands it to each rule; the rules are its only writers. It keeps the
report short: what is found of one module in many layers is one check, and there are at most `MAX_PER_NAME` under one
name, then a count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.report import Check, Verdict

MAX_PER_NAME = 20
MAX_SHOWN = 80
_MAX_RANGES = 6
_LAYER = re.compile(r"\blayers\.([0-9]{1,6})\.")
# matrices of one LoRA are one thing to mend
_HALF = re.compile(r"\blora_(embedding_)?[AB]\b")
_PART = re.compile(r"\.(?:lora_|token_adapter|base_layer|weight|bias).*")


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
        self._found: dict[tuple[str, Verdict, str, str], _Group] = {}
        self._settled: dict[str, None] = {}
        self._num_groups: Counter[tuple[str, Verdict]] = Counter()
        self._left_out: Counter[tuple[str, Verdict]] = Counter()

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
        return any(verdict == "fail" and (not names or name in names) for name, verdict, *_ in self._found)

    def checks(self) -> list[Check]:
        """All checks, with one line for those left out."""
        found = {name for name, *_ in self._found}
        passed = [Check(name, "pass") for name in self._settled if name not in found]
        return passed + [group.check() for group in self._found.values()] + self._summaries()

    def _summaries(self) -> list[Check]:
        left_out = self._left_out.items()
        return [Check(*kind, f"{count} more findings of this kind are left out.") for kind, count in left_out]

    def _add(self, name: str, verdict: Verdict, message: str, subject: str) -> None:
        layer = _LAYER.search(subject)
        key = (
            (name, verdict, _generalize(message), _generalize(subject)) if layer else (name, verdict, message, subject)
        )
        group = self._found.get(key)
        if group is None:
            if self._num_groups[name, verdict] == MAX_PER_NAME:
                self._left_out[name, verdict] += 1
                return
            self._num_groups[name, verdict] += 1
            group = self._found[key] = _Group(Check(name, verdict, message, subject[:512]))
        group.count += 1
        if layer is not None:
            group.layers.add(int(layer[1]))


class _Group(msgspec.Struct):
    """What was found of one module, in one layer or in many: its first check stands for it."""

    first: Check
    count: int = 0
    layers: set[int] = set()

    def check(self) -> Check:
        """The check, whose message says of how many it is true."""
        if self.count == 1:
            return self.first
        _, _, path = _PART.sub("", self.first.subject).rpartition("layers.")
        layers = f"layer{'s' if len(self.layers) > 1 else ''} {_name_ranges(self.layers)}"
        where = f"{path.rpartition('.')[2]} in {layers}"
        message = f"{where} ({self.count} tensors): {self.first.message}"
        return msgspec.structs.replace(self.first, message=message)


def _generalize(text: str) -> str:
    return _HALF.sub("lora_", _LAYER.sub("layers..", text))


def _name_ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, neighbours as a range: `0-3, 7`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return listed([f"{low}-{high}" if low < high else str(low) for low, high in ranges], _MAX_RANGES)
