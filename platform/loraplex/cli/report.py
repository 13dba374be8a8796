"""A report on an adapter's files: what failed first, then warnings, how much passed, and which fields take effect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplex.cli.output import cell, clean
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.report import Check, Report

_MAX_VALUE_LEN = 60
_STYLES = {"fail": "red", "warn": "yellow", "note": "dim", "pass": "green"}
_NOT_RUN = "parity"
"""The check that warns as long as nobody runs it: nothing is wrong, and nobody has to act."""


def print_report(console: Console, report: Report, *, all_checks: bool = False) -> None:
    """Print a report.

    Args:
        console: Where to.
        report: What the registry or the local check found.
        all_checks: Also name the checks that passed.
    """
    shown = [check for check in report.in_order() if all_checks or check.verdict != "pass"]
    if shown:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("verdict", "check", "subject", "message"):
            table.add_column(column, overflow="fold")
        for check in sorted(shown, key=lambda check: name_verdict(check) in ("note", "pass")):
            verdict = name_verdict(check)
            table.add_row(
                f"[{_STYLES[verdict]}]{verdict}[/]",
                cell(check.name),
                cell(check.subject),
                cell(clean(check.message)),
            )
        console.print(table)
    if isinstance(report.parity, ParityResult):
        console.print(Text(describe_parity(report.parity), style="dim"))
    num_passed, num_checks = report.count_passed()
    verdict = "pass, with a note" if _only_notes(report) else report.verdict
    console.print(f"[dim]{num_passed} of {num_checks} checks passed; verdict: {verdict}[/dim]")
    if fields := describe_honoured(report.honoured):
        console.print(Text(f"in effect: {fields}", style="dim"))


def describe_parity(parity: ParityResult) -> str:
    """Return in one line how far an engine's answers were from those of the base with merged deltas, and the limits."""
    logits, kl = (
        f"{what} {found:.3g} (limit {limit:.3g}, the base alone {base:.3g})"
        for what, found, limit, base in (
            ("logits differ by", parity.max_logit_difference, parity.logit_limit, parity.base_logit_difference),
            ("KL", parity.max_kl, parity.kl_limit, parity.base_kl),
        )
    )
    where = f"{parity.dtype}, {parity.num_positions} positions of {parity.num_prompts} prompts"
    return f"parity: {logits}; {kl}; {where}"


def name_verdict(check: Check) -> str:
    """Return a check's verdict as people read it: a warning about which nobody has to do anything is a note."""
    return "note" if check.verdict == "warn" and check.name == _NOT_RUN else check.verdict


def _only_notes(report: Report) -> bool:
    kinds = {name_verdict(check) for check in report.checks}
    return report.verdict == "warn" and "note" in kinds and "warn" not in kinds


def describe_honoured(honoured: Mapping[str, Any]) -> str:
    """Return the fields of the config that take effect, in one line; what is off, empty or absent is left out."""
    return ", ".join(
        name if value is True else f"{name}={_shorten(value)}" for name, value in honoured.items() if value
    )


def _shorten(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "|".join(value)
    text = str(cell(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return text if len(text) <= _MAX_VALUE_LEN else text[: _MAX_VALUE_LEN - 1] + "…"
