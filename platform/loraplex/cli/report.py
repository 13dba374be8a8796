"""A report on an adapter's files as a table: what failed first, then warnings, then how much passed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loraplex.cli.output import cell, clean
from loraplex_registry.peft.report import Report

_STYLES = {"fail": "red", "warn": "yellow", "pass": "green"}


def print_report(console: Console, report: Report, *, all_checks: bool = False) -> None:
    """Print a report.

    Args:
        console: Where to.
        report: What the registry or the local check found.
        all_checks: Also name the checks that passed.
    """
    shown = [check for check in report.checks if all_checks or check.verdict != "pass"]
    if shown:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("verdict", "check", "subject", "message"):
            table.add_column(column, overflow="fold")
        for check in sorted(shown, key=lambda check: list(_STYLES).index(check.verdict)):
            table.add_row(
                f"[{_STYLES[check.verdict]}]{check.verdict}[/]",
                cell(check.name),
                cell(check.subject),
                cell(clean(check.message)),
            )
        console.print(table)
    num_passed = sum(check.verdict == "pass" for check in report.checks)
    console.print(f"[dim]{num_passed} of {len(report.checks)} checks passed; verdict: {report.verdict}[/dim]")
