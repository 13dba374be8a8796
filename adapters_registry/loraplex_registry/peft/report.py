"""The report on an adapter's files: ordered named checks and what of the config is honoured or refused.

Written by `check_adapter` and, for its own checks (quota, parity), by the registry. Names are the contract: the cases,
the clients and the docs refer to them. It knows no HTTP and no storage.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loraplex_registry.peft.parity import ParityResult

Verdict = Literal["pass", "warn", "fail"]

CHECK_NAMES: tuple[str, ...] = (
    "file_name",
    "file_set",
    "file_size",
    "pickle",
    "lfs_pointer",
    "format",
    "header",
    "truncated",
    "json",
    "peft_type",
    "task_type",
    "field_unsupported",
    "field_value",
    "base_mismatch",
    "target_modules",
    "unmatched_tensors",
    "unpaired_tensors",
    "missing_tensors",
    "unexpected_tensor",
    "shape",
    "rank_mismatch",
    "rank_limit",
    "non_finite",
    "template",
    "quota",
    "parity",
)
"""Every check name there is, in the order in which a report lists them."""


class Check(msgspec.Struct, frozen=True):
    """One verdict on one subject.

    `name` is one of `CHECK_NAMES`; `message` is one sentence that says what to do where the verdict is not `pass`;
    `subject` names the file, field or tensor, of many alike the first, and is empty where the check passed as a whole.
    """

    name: str
    verdict: Verdict
    message: str = ""
    subject: str = ""


class Report(msgspec.Struct, frozen=True):
    """What was checked, in the order of `CHECK_NAMES`.

    `honoured` maps each honoured config field to the value in effect; `refused` maps each refused field to the
    sentence that says why. `parity` is absent until an engine has measured it.
    """

    verdict: Verdict
    checks: tuple[Check, ...]
    honoured: dict[str, Any] = {}
    refused: dict[str, str] = {}
    parity: ParityResult | msgspec.UnsetType = msgspec.UNSET

    @property
    def first_failure(self) -> Check | None:
        """The first failing check, whose subject is the `param` of an API error; None where nothing failed."""
        return next((check for check in self.checks if check.verdict == "fail"), None)

    def in_order(self) -> list[Check]:
        """The checks in the order in which to read them: what causes failures, failures, warnings, what passed."""
        has_orphans = any(check.verdict == "fail" and check.name == "unmatched_tensors" for check in self.checks)

        def rank(check: Check) -> int:
            if has_orphans and check.name == "target_modules" and check.verdict != "pass":
                return -1
            return ("fail", "warn", "pass").index(check.verdict)

        return sorted(self.checks, key=rank)

    def count_passed(self) -> tuple[int, int]:
        """How many of the named checks passed, and how many were made: a name counts once, whatever it found."""
        names = {check.name for check in self.checks}
        return len(names - {check.name for check in self.checks if check.verdict != "pass"}), len(names)

    def with_check(self, check: Check) -> Report:
        """A copy with one more check, in its place, and the verdict that follows (quota, parity)."""
        report = build_report((*self.checks, check), honoured=self.honoured, refused=self.refused)
        return msgspec.structs.replace(report, parity=self.parity)

    def with_parity(self, check: Check, result: ParityResult) -> Report:
        """A copy with the check `parity` and the numbers that it is drawn from, in place of an earlier one."""
        others = tuple(other for other in self.checks if other.name != check.name)
        report = build_report((*others, check), honoured=self.honoured, refused=self.refused)
        return msgspec.structs.replace(report, parity=result)


def build_report(
    checks: tuple[Check, ...] | list[Check],
    *,
    honoured: dict[str, Any] | None = None,
    refused: dict[str, str] | None = None,
) -> Report:
    """Put checks in the contract's order and draw the verdict: the worst of them.

    Raises:
        ValueError: a check has a name outside `CHECK_NAMES`.
    """
    ordered = tuple(sorted(checks, key=lambda check: CHECK_NAMES.index(check.name)))
    return Report(_worst(ordered), ordered, honoured or {}, refused or {})


def _worst(checks: tuple[Check, ...]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    if "fail" in verdicts:
        return "fail"
    return "warn" if "warn" in verdicts else "pass"
