"""The rule by which a slow task is named, and the warning and the curves of real workers, one of which is slow."""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import time

import pytest

from tests.helpers import fork_server, tiers
from tests.monitoring.test_tensorboard import curves
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.monitoring.slow_tasks import SlowTaskRule

SLOW = (61.0, 20.0)
EVEN = (20.0, 20.0)


@pytest.mark.parametrize(
    ("comparisons", "warnings"),
    [
        ([SLOW] * 2, []),
        ([SLOW] * 3, [2]),
        ([SLOW, SLOW, EVEN, SLOW, SLOW], []),
        ([SLOW] * 12, [2]),
        ([SLOW] * 23, [2, 12, 22]),
        ([SLOW] * 3 + [(95.0, 20.0)] * 3, [2, 5]),
        ([SLOW] * 3 + [(80.0, 20.0)] * 3, [2]),
        ([SLOW] * 3 + [(95.0, 20.0)] + [SLOW] * 3, [2]),
        ([SLOW] * 3 + [EVEN] * 2 + [SLOW] * 3, [2]),
        ([SLOW] * 3 + [EVEN] * 3 + [SLOW] * 3, [2, 8]),
        ([(6.0, 1.1)] * 9, []),
        ([(29.0, 20.0)] * 9, []),
        ([(31.0, 20.0)] * 3, [2]),
        ([(20.0, 20.0, 20.0, 61.0)] * 3, [2]),
        ([(20.0, 61.0, 61.0, 61.0)] * 9, []),
        ([(20.0,)] * 9, []),
        ([()] * 9, []),
    ],
)
def test_a_task_is_named_once_until_it_recovers(comparisons, warnings):
    rule = SlowTaskRule()
    due = [rule.note({f"worker:{index}": ms for index, ms in enumerate(times)}) for times in comparisons]
    assert [number for number, tasks in enumerate(due) if tasks] == warnings
    for tasks, times in zip(due, comparisons, strict=True):
        slowest = f"worker:{times.index(max(times))}" if times else ""
        assert tasks in ({}, {slowest: 20.0})


# A wait in the step that others wait in, too: before the fetch, in it, and before the forward pass.
CASES = [
    {"slow": "callback", "data": "arrays"},
    {"slow": "data", "data": "dataset"},
    {"slow": "", "data": "arrays"},
    {"slow": "agreed callback", "data": "arrays"},
    {"slow": "callback", "data": "function"},
    {"slow": "callback", "data": "arrays", "steps_per_execution": 5},
    {"slow": "callback", "data": "own", "jit_compile": True, "gradient_accumulation_steps": 2},
    {"slow": "callback", "data": "dataset", "run_eagerly": True},
    {"slow": "callback", "data": "arrays", "model": "synchronized"},
    {"slow": "callback", "data": "arrays", "model": "step"},
]


@pytest.mark.parametrize("options", tiers.cases(CASES, quick=2), ids=lambda each: " ".join(map(str, each.values())))
def test_the_slow_one_of_two_workers_is_named(tmp_path, options):
    command = fork_server.command("tests.multiprocess.slow_program", str(tmp_path), json.dumps(options))
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    shown = io.BytesIO()
    launcher = Launcher(
        Options(["timeout", "200", *command], local_cluster(2), tmp_path / "logs", environ), output=shown
    )
    text = shown.getvalue().decode() if (code := launcher.run()) == 0 else ""
    assert code == 0, shown.getvalue().decode()
    found = curves(tmp_path / "curves")
    fast, slow = (statistics.median(ms for _, ms in found[run]["perf/own_step_ms"]) for run in ("train", "worker-1"))
    if options["slow"]:
        # A batch may be ready: it was prefetched during the wait for gradients, or at the end of an epoch, which do not count.
        assert slow > 1.5 * fast + 5, (fast, slow)
        assert "worker:1 takes" in text and "times as long as the median" in text
    assert "worker:0 takes" not in text and (options["slow"] or "worker:1 takes" not in text)


@pytest.mark.full
@pytest.mark.parametrize(("chief", "ps"), [("worker:0", 0), ("chief:0", 1)])
def test_a_worker_that_signals_stop_most_of_the_time_is_named(tmp_path, chief, ps):
    # A program of its own: SIGSTOP to a forked one stops its client alone.
    options = {
        "slow": "stopped",
        "data": "function",
        "width": 3072,
    }  # steps of 10 ms and more: differences of 5 ms are noise
    command = [sys.executable, "-m", "tests.multiprocess.slow_program", str(tmp_path), json.dumps(options)]
    with Roles(command, tmp_path / "roles", workers=2, ps=ps) as roles:
        ends = time.monotonic() + 300
        while roles.processes[chief].poll() is None and time.monotonic() < ends:
            for what, seconds in (("stop", 0.05), ("continue", 0.02)):
                roles.send(what, "worker:1")
                time.sleep(seconds)
        assert roles.wait(chief, 60) == 0, roles.log(chief)
        assert "worker:1 takes" in roles.log(chief) and "worker:0 takes" not in roles.log(chief)
    found = curves(tmp_path / "curves")
    fast, slow = (
        statistics.median(ms for _, ms in values)
        for values in (
            [found["train"][f"perf/own_step_ms/worker-{n}"] for n in (0, 1)]
            if ps
            else [found[run]["perf/own_step_ms"] for run in ("train", "worker-1")]
        )
    )
    assert slow > 1.5 * fast + 5, (fast, slow)
