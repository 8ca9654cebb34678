"""A wait within a step is bounded: the task that the others wait for is named with its line, and work that takes long is not."""

import signal
import time

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tests.multiprocess.waiting import wait_until
from tfdist.runtime.activity import Activity
from tfdist.training.hangs import Report, awaited_tasks

LIMIT = 5
SLEEP = "tests/multiprocess/hang_program.py"


def started(tmp_path, monkeypatch, transport, how, rank):
    monkeypatch.setenv(harness.TRANSPORT, transport)
    command = fork_server.command("tests.multiprocess.hang_program", how, str(rank), str(LIMIT), str(tmp_path))
    return Roles(command, tmp_path / "roles", workers=2, ps=0)


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize(
    ("how", "what"),
    tiers.cases(
        [
            ("callback", "is at"),
            ("map", "waits for its data at"),
            ("absent", "is at"),
            ("stop", "does not answer"),
            ("map_loop", "waits for data in its input pipeline;"),
        ],
        quick=[("callback", "is at"), ("map", "waits for its data at")],
    ),
)
def test_the_task_that_hangs_is_named_with_its_line(tmp_path, monkeypatch, transport, how, what):
    with started(tmp_path, monkeypatch, transport, how, 1) as roles:
        if how != "map_loop":  # a loop in the graph prints nothing
            wait_until(lambda: "it happens" in roles.log("worker:1"), 120)
        began = time.monotonic()
        assert roles.wait("worker:0", 120 if how == "map_loop" else 60) == 1
        assert time.monotonic() - began < LIMIT + 20 or how == "map_loop"
        log = roles.log("worker:0")
        place = f" {SLEEP}:" if what.endswith("at") else ""
        silent = "worker:0 waits for worker:1 at " if how == "stop" else None  # the watch for lost workers may be first
        named = [text for text in (f"worker:1 {what}{place}", silent) if text]
        assert any(f"tfdist.errors.ClusterError: {text}" in log for text in named), log
        assert "worker:1 has waited" not in log.rpartition("ClusterError: ")[2]
        assert "longer than the limit of 5 s (strategy.timeout_seconds)" in log or how == "stop", log
        assert "tfdist: the stacks of worker:0: worker:" in log, log
        if how == "stop":
            roles.processes["worker:1"].send_signal(signal.SIGCONT)
        assert roles.wait("worker:1", 60) == 1, "the task that hangs ends, too"


@pytest.mark.parametrize("transport", tiers.cases(["grpc", "shared_memory"], quick=["grpc"]))
@pytest.mark.parametrize(("how", "rank"), [("first", 1), ("evaluating", 0), ("saving", 0)])
def test_long_work_is_no_hang(tmp_path, monkeypatch, transport, how, rank):
    with started(tmp_path, monkeypatch, transport, how, rank) as roles:
        assert [roles.wait(task, 150) for task in roles.processes] == [0, 0], roles.log("worker:0")
        assert "it happens" in roles.log(f"worker:{rank}")
        assert all("ClusterError" not in roles.log(task) for task in roles.processes)


@pytest.mark.parametrize(
    ("how", "what"),
    tiers.cases(
        [
            ("pipeline", "tfdist.errors.ClusterError: worker:1 has run step "),
            ("step", "tfdist.errors.ClusterError: worker:"),
            ("map", "s for its data at tests/multiprocess/ps_hang_program.py:"),
        ],
        quick=1,
    ),
)
def test_a_step_on_a_worker_and_the_data_of_the_chief_are_bounded(tmp_path, how, what):
    command = fork_server.command("tests.multiprocess.ps_hang_program", how, str(LIMIT))
    with Roles(command, tmp_path / "roles", workers=2, ps=1) as roles:
        assert roles.wait("chief:0", 150) == 1
        log = roles.log("chief:0")
        assert what in log, log
        assert "longer than the limit of 5 s (strategy.timeout_seconds)" in log
        assert [roles.wait(task, 30) for task in ("worker:0", "worker:1", "ps:0")] == [1, 1, 1]


def test_the_limit_follows_the_longest_step():
    now = 0.0
    waits = Activity(clock=lambda: now)

    def step(seconds, first=False):
        nonlocal now
        now += 1
        waits.begin("step", first)
        now += seconds
        waits.end()

    step(500, first=True)
    assert waits.limit(None) == 60, "a first execution may compile"
    step(0.2)
    assert waits.limit(None) == 60
    step(20)
    assert round(waits.limit(None)) == 100
    waits.begin("step")
    now += 99
    assert round(waits.waited()) == 99
    waits.traces += 1
    assert round(waits.limit(None)) == 1000, "traced again"
    assert (waits.limit(3), waits.limit(0)) == (30, float("inf"))


STEP = Report("step", step=7, waited=61)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Report("user", place="script.py:42 in load_batch"), "is at script.py:42 in load_batch"),
        (Report("data", place="script.py:42 in parse", step=7, waited=61), "waits for its data at script.py:42 in parse"),
        (Report("data", step=7, waited=61), "waits for data in its input pipeline"),
        (Report("silent"), "does not answer: is it stopped, or is its host gone?"),
        (Report("exchange", step=6, waited=61, place="script.py:9 in f"), "waits in another collective at script.py:9 in f"),
        (Report("building", first=True), None),
        (Report("step", first=True, step=7, waited=61), None),
        (Report("saving"), None),
        (Report("evaluating"), None),
        (Report("step", step=7, waited=61), None),
    ],
)  # fmt: skip
def test_who_is_waited_for(other, named):
    found = awaited_tasks({"worker:0": STEP, "worker:1": other}, "worker:0", 60)
    assert found == ({"worker:1": named} if named else {})
