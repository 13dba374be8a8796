"""A few tests that failed beside others are run once more, alone in one process: machines are of all speeds.

The plugin belongs to the process that reports, and asks for the second try when all workers have ended. A test that
passes then counts as passed, and the closing line as well as a section of its own say which ones needed it. Nothing is
tried again where more than `MOST` failed, where the run was cut short, or where anything but a test failed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from _pytest.terminal import TerminalReporter

MOST = 10


class SecondTry:
    """Tries again, once, what failed in this run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._mended: list[pytest.TestReport] = []
        self._is_refuted = False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Make a failed run a good one if all that failed passes alone."""
        reporter = self._reporter()
        failed = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
        node_ids = list(dict.fromkeys(report.nodeid for report in failed))
        is_whole = exitstatus == pytest.ExitCode.TESTS_FAILED and not (session.shouldfail or session.shouldstop)
        are_tests = all(isinstance(report, pytest.TestReport) for report in failed)
        if not (is_whole and are_tests and 0 < len(node_ids) <= MOST):
            return
        reporter.write_sep("=", f"{len(node_ids)} failed beside others: a second try, alone")
        if self._run(node_ids) != 0:
            self._is_refuted = True
            return
        for kind in ("failed", "error"):
            reporter.stats.pop(kind, None)
        # what failed when it was taken down has passed already
        passed = {report.nodeid for report in reporter.stats.get("passed", [])}
        mended = {report.nodeid: report for report in reversed(failed)}
        reporter.stats.setdefault("passed", []).extend(mended[one] for one in node_ids if one not in passed)
        reporter.stats["rerun"] = self._mended = [mended[one] for one in node_ids]
        session.testsfailed = 0
        session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Show what needed a second try, and why."""
        if self._is_refuted:
            terminalreporter.write_line("Of what failed beside others, something failed alone, too (above).", red=True)
        if not self._mended:
            return
        terminalreporter.write_sep("=", "passed on a second try")
        for report in self._mended:
            terminalreporter.write_sep("_", report.nodeid)
            terminalreporter.write_line(report.longreprtext)
        for report in self._mended:
            terminalreporter.write_line(f"passed alone, failed beside others: {report.nodeid}", yellow=True)

    def _run(self, node_ids: Sequence[str]) -> int:
        config = self._config
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
        if config.inipath is not None:
            command += ["-c", str(config.inipath), "--rootdir", str(config.rootpath)]
        if config.getoption("--endure", default=False):
            command.append("--endure")
        sys.stdout.flush()
        return subprocess.run([*command, *node_ids], cwd=config.rootpath, check=False).returncode

    def _reporter(self) -> TerminalReporter:
        found = self._config.pluginmanager.get_plugin("terminalreporter")
        assert isinstance(found, TerminalReporter)
        return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Only whole runs ask for it."""
    parser.addoption("--second-try", action="store_true", help="run a few tests that failed once more, alone")


def pytest_configure(config: pytest.Config) -> None:
    """Workers report to a process that has the plugin."""
    if config.getoption("--second-try") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(config), "second_try")
