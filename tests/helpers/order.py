"""Which process runs which test file, and when: the longest files first, and those that mostly wait beside those that compute.

A file is never divided: its tests share fixtures that train. `tests/durations.json` has the seconds of each test, as
`make durations` measured them.
"""

from __future__ import annotations

import collections
import json
import pathlib

import pytest
from xdist.scheduler import LoadFileScheduling

DURATIONS = pathlib.Path(__file__).parents[1] / "durations.json"
# Tests of processes that start, connect and end: they mostly wait for each other.
WAITING = (
    "tests/launch/",
    "tests/cluster/",
    "tests/doctor/",
    "tests/commands/test_launch",
    "tests/commands/test_cluster",
)
WAITING += ("tests/commands/test_doctor", "tests/end_to_end/test_start_order")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "how many of --numprocesses are kept for tests that mostly wait"
    parser.addoption("--waiting-processes", type=int, default=0, help=text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoGroups | None:
    waiting: int = config.getoption("waiting_processes")
    return TwoGroups(config, log, waiting) if waiting else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests by the seconds of their file, the longest file first; a file without a measurement counts as short."""
    durations = json.loads(DURATIONS.read_text())
    seconds: collections.Counter[str] = collections.Counter()
    for item in items:
        seconds[file_of(item.nodeid)] += durations.get(item.nodeid, 0)
    items.sort(key=lambda item: -seconds[file_of(item.nodeid)])  # stable: a file's tests keep their order


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class TwoGroups(LoadFileScheduling):  # type: ignore[misc]
    """Keeps some worker processes for files that mostly wait, so that they run beside the files that compute.

    Args:
        config: pytest's configuration.
        log: As of `LoadFileScheduling`.
        waiting: The number of worker processes that are kept.
    """

    def __init__(self, config: pytest.Config, log: object, waiting: int):
        super().__init__(config, log)
        self._kept = waiting
        self._waiting: frozenset[object] = frozenset()

    def schedule(self) -> None:
        if self.collection is None:  # all worker processes are there, and have no work yet
            nodes = sorted(self.nodes, key=lambda node: str(node.gateway.id))
            self._waiting = frozenset(nodes[max(1, len(nodes) - self._kept) :])  # one must compute
        super().schedule()

    def _assign_work_unit(self, node: object) -> None:
        if file := self._next_file(node):
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: object) -> None:
        if self.workqueue and not self._next_file(node):
            node.shutdown()  # type: ignore[attr-defined]
        else:
            super()._reschedule(node)

    def _next_file(self, node: object) -> str | None:
        """Returns the next file for a worker process: of its own group, or any for one that computes and has no more."""
        if node in self._waiting:
            return next((file for file in self.workqueue if file.startswith(WAITING)), None)
        return next((file for file in self.workqueue if not file.startswith(WAITING)), next(iter(self.workqueue), None))
