"""Runs up to three failed tests again, each alone, once all others have ended; a test that passes then is reported as unstable.

A loaded machine makes tests fail that wait for less than they should. Such a test must not stop unrelated work, and must not be
forgotten: the run passes, prints `unstable: TEST: last line of the failure` for each, and appends these lines to `build/unstable.txt`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3  # failed tests of one run that are run again
_LIMIT = 900.0  # seconds for a test that runs again


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"run up to {MOST} failed tests again, each alone, at the end"
    parser.addoption("--second-chance", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("second_chance") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondChance(config))


class SecondChance:
    """A plugin of the process that reports: the only one, or the one that controls the worker processes.

    Args:
        config: pytest's configuration.
    """

    def __init__(self, config: pytest.Config):
        self._config = config
        self._collected: set[str] = set()
        self._finished: set[str] = set()
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._has_other_errors = False
        self._unstable = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._collected |= set(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._has_other_errors |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._finished.add(report.nodeid)
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Changes the exit code if all failed tests pass now; all worker processes have ended."""
        complete = self._finished >= self._collected and not self._has_other_errors
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not complete or len(self._failed) > MOST:
            return
        if all([self._passes(nodeid) for nodeid in self._failed]):
            self._unstable = True
            session.exitstatus = pytest.ExitCode.OK
            stats = self._config.pluginmanager.get_plugin("terminalreporter").stats
            stats["unstable"] = [report for kind in ("failed", "error") for report in stats.pop(kind, ())]

    def _passes(self, nodeid: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-m", "", "--numprocesses=0", nodeid]
        print(f"\nruns again, alone: {nodeid}", flush=True)
        try:
            return subprocess.run(command, cwd=self._config.rootpath, timeout=_LIMIT).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Shows the first failures of unstable tests, which do not count as failed."""
        if not self._unstable:
            return
        lines = []
        for nodeid, reports in self._failed.items():
            lines.append(f"unstable: {nodeid}: {last_line(reports[0])}")
            terminalreporter.section(f"first failure of {nodeid}", sep="_")
            terminalreporter.line("\n".join(report.longreprtext for report in reports))
        terminalreporter.section("unstable tests: find the cause before anything else")
        for line in lines:
            terminalreporter.line(line)
        file = self._config.rootpath / "build" / "unstable.txt"
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as appended:
            appended.writelines(f"{line}\n" for line in lines)


def last_line(report: pytest.TestReport) -> str:
    """Returns the last line of what a failed test said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext).strip().splitlines()[-1].strip()
