"""What a measurement means: the check `parity` of the report, in words for the team. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.report import Check, Report

NOT_RUN = Check(
    "parity",
    "warn",
    "not run: no engine of this base was there to compare answers with those of the merged weights. Nothing to do; "
    "the exact checks above passed.",
)
"""The check of a version that became ready without a measurement."""


@dataclass(frozen=True)
class Outcome:
    """The end of a version's wait: what was measured, None if nothing could be."""

    result: ParityResult | None

    @property
    def is_fault(self) -> bool:
        """Whether the version must not be served."""
        return self.result is not None and not self.result.is_within

    @property
    def weights_digest(self) -> str | None:
        """The weights that the version may be served with, None if it was not found right with any."""
        return None if self.result is None or self.is_fault else self.result.weights_digest or None

    @property
    def check(self) -> Check:
        """The check for the report."""
        if self.result is None:
            return NOT_RUN
        return Check("parity", "fail" if self.is_fault else "pass", _describe(self.result))

    def add_to(self, report: Report) -> Report:
        """Return the report with this outcome, in place of an earlier one."""
        if self.result is not None:
            return report.with_parity(self.check, self.result)
        return report if any(check.name == "parity" for check in report.checks) else report.with_check(self.check)


def _describe(result: ParityResult) -> str:
    rms = "" if result.rms_limit is None else f"RMS {result.rms_difference:.3g} (limit {result.rms_limit:.3g}), "
    measured = (
        f"max logit difference {result.max_logit_difference:.3g} (limit {result.logit_limit:.3g}), {rms}"
        f"KL {result.max_kl:.3g} (limit {result.kl_limit:.3g}) over {result.num_positions} positions in {result.dtype}"
    )
    if result.is_within:
        return f"The engine answers as the merged weights do: {measured}."
    if not result.is_finite:
        return (
            "The engine's answers with this adapter hold numbers that are not finite; train with a lower learning "
            "rate or a smaller scale and upload it again."
        )
    return (
        f"The engine does not answer as the merged weights do: {measured}. The files are in order; tell the "
        "administrator, who can compare and release the version."
    )
