"""Slow is not stuck: a wait is warned about with the task and its line, and only a proof ends the job."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tests.multiprocess.waiting import wait_until
from tfdist.cluster.local import local_cluster
from tfdist.runtime.report.phase import Phases, phase
from tfdist.runtime.report.task_report import Report
from tfdist.training import hangs

LIMIT = 30
PROGRAM = "tests/multiprocess/hang_program.py"


def started(tmp_path, monkeypatch, transport, how, limit=LIMIT):
    monkeypatch.setenv(harness.TRANSPORT, transport)
    command = fork_server.command("tests.multiprocess.hang_program", how, str(limit))
    return Roles(command, tmp_path / "roles", workers=2, ps=0)


@pytest.mark.parametrize("transport", tiers.cases(["grpc", "shared_memory"], quick=["grpc"]))
@pytest.mark.parametrize(
    ("how", "what"),
    tiers.cases(
        [
            ("callback", f"worker:1 is at {PROGRAM}:"),
            ("map", f"worker:1 waits for its data at {PROGRAM}:"),
            ("absent", f"worker:1 is at {PROGRAM}:"),
            ("stop", "worker:0 waits for worker:1 at "),
            ("map_loop", "worker:1 waits for data in its input pipeline;"),
        ],
        quick=[("map", f"worker:1 waits for its data at {PROGRAM}:")],
    ),
)
def test_the_task_that_hangs_is_named_with_its_line(tmp_path, monkeypatch, transport, how, what):
    with started(tmp_path, monkeypatch, transport, how) as roles:
        if how != "map_loop":  # a loop in the graph prints nothing
            wait_until(lambda: "it happens" in roles.log("worker:1"), 120)
        assert roles.wait("worker:0", 120) == 1
        log = roles.log("worker:0")
        error = log.rpartition("ClusterError: ")[2]
        assert error.startswith(what), log
        if how == "stop":
            roles.processes["worker:1"].send_signal(signal.SIGCONT)
        else:
            *_, warned = re.findall(r"worker:0 has waited \d+ s for worker:1, which (.*); the job goes on", log)
            assert error.startswith(f"worker:1 {warned}; worker:0 has waited "), log
            limit = LIMIT if how == "map_loop" else LIMIT // 3
            assert f"the limit is {limit} s" in error.lower()
            assert "raise Trainer(timeout_seconds=30), or use tfdist.slow" in error
            assert "tfdist: the stacks of worker:0: worker:1 " in log
        assert roles.wait("worker:1", 60) == 1, "the task that hangs ends, too"


def test_a_deadlock_ends(tmp_path, monkeypatch):
    """Each worker waits in a collective of its own."""
    with started(tmp_path, monkeypatch, "shared_memory", "different", limit=600) as roles:
        assert [roles.wait(task, 120) for task in roles.processes] == [1, 1]
        for task in roles.processes:
            log = roles.log(task)
            assert "all tasks wait in step 1, and none computes: a deadlock, in which worker:" in log, log


def healthy(roles, seconds):
    """Checks that all waits of the program are warned about, and that it ends well."""
    assert [roles.wait(task, seconds) for task in roles.processes] == [0, 0], roles.log("worker:0")
    warned = re.compile(r"now: (\w+)|(worker:\d) has waited \d+ s for (.*); the job goes on")
    found = set()
    for task in roles.processes:
        now = ""
        for line in roles.log(task).splitlines():
            if match := warned.search(line):
                now = match[1] or now
                if match[2]:
                    found.add((now, match[2], re.sub(r" at .*:\d+", "", match[3])))
    return found


@pytest.mark.parametrize("transport", tiers.cases(["grpc", "shared_memory"], quick=["shared_memory"]))
def test_a_healthy_job_is_warned_about_and_lives(tmp_path, monkeypatch, transport):
    with started(tmp_path, monkeypatch, transport, "healthy", limit=60) as roles:
        found = healthy(roles, 240)
    callback = "worker:1, which is in on_train_batch_end"
    assert ("callback", "worker:0", "worker:1, which is in sleep") in found, "before the first fit"
    assert ("section", "worker:1", "worker:0, which is in sleep") in found, "between two calls of fit"
    assert ("section", "worker:0", "worker:1, which is in the section 'upload' in sleep") in found
    assert ("writing", "worker:0", callback) in found
    assert ("validation", "worker:0", "worker:1, which waits for its data in sleep") in found
    # On a busy machine one worker may trace its first step a second longer than the other, and is waited for.
    waits = [each for each in found if each[0] in ("batch", "execution") and "in its first step" not in each[2]]
    assert not waits, "nobody waits for another task"


def by_mpi(how, limit):
    """Runs the program by mpirun; returns the exit code and the output of all ranks."""
    command = [*harness.MPIRUN, "-np", "2", sys.executable, "-m", "tests.multiprocess.hang_program", how, str(limit)]
    done = subprocess.run(
        command, env=harness.mpi_environ("mpi"), cwd=harness.ROOT, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_a_healthy_job_lives_over_mpi():
    code, output = by_mpi("healthy", 60)
    assert code == 0, output
    assert re.search(r"worker:0 has waited \d+ s for worker:1, which waits for its data at ", output)


@pytest.mark.full
def test_a_callback_that_does_nothing_ends_over_mpi():
    code, output = by_mpi("callback", LIMIT)
    assert code != 0
    assert re.search(rf"ClusterError: worker:1 is at {PROGRAM}:\d+ in sleep; worker:0 has waited \d+ s for it", output)


def test_slow_data_of_the_chief_of_servers_are_warned_about(tmp_path):
    command = fork_server.command("tests.multiprocess.ps_hang_program", "slow", "60")
    with Roles(command, tmp_path / "roles", workers=1, ps=1) as roles:
        assert [roles.wait(task, 150) for task in roles.processes] == [0, 0, 0], roles.log("chief:0")
        warned = r"chief:0 waits for its data at tests/multiprocess/ps_hang_program.py:\d+ in load_batch, for \d s now; the job"
        assert re.search(warned, roles.log("chief:0"))


@contextlib.contextmanager
def busy_processes(per_core):
    """Keeps all cores busy."""
    command = ["nice", sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(per_core * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_healthy_job_lives_under_load(tmp_path, monkeypatch, transport):
    with busy_processes(5), started(tmp_path, monkeypatch, transport, "healthy", limit=60) as roles:
        healthy(roles, 600)


@pytest.mark.slow
def test_a_callback_of_70_seconds_lives(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch, "grpc", "real", limit=1800) as roles:
        found = healthy(roles, 400)
    assert ("callback", "worker:0", "worker:1, which is in sleep") in found


@pytest.mark.parametrize(
    ("how", "what"),
    tiers.cases(
        [
            ("pipeline", "tfdist.errors.ClusterError: worker:1 has run a step for "),
            ("step", "tfdist.errors.ClusterError: worker:"),
            ("map", "chief:0 waits for its data at tests/multiprocess/ps_hang_program.py:"),
        ],
        quick=1,
    ),
)
def test_a_step_on_a_worker_and_the_data_of_the_chief_are_bounded(tmp_path, how, what):
    command = fork_server.command("tests.multiprocess.ps_hang_program", how, "15")
    with Roles(command, tmp_path / "roles", workers=2, ps=1) as roles:
        assert roles.wait("chief:0", 150) == 1
        log = roles.log("chief:0")
        assert what in log, log
        assert "Trainer(timeout_seconds=15)" in log
        assert [roles.wait(task, 30) for task in ("worker:0", "worker:1", "ps:0")] == [1, 1, 1]


def test_a_wait_is_long_from_five_times_the_longest():
    now = 0.0
    phases = Phases(clock=lambda: now)

    def step(seconds, is_first=False):
        nonlocal now
        with phase("step", is_first=is_first, phases=phases):
            now += seconds

    step(500, is_first=True)
    assert phases.long_wait() == 60, "a first execution may compile"
    step(0.2)
    assert phases.long_wait() == 60
    step(20)
    assert phases.long_wait() == pytest.approx(100)
    with phase("step", phases=phases):
        now += 99
        assert phases.waited() == 99
        assert not phases.is_first
        phases.traces += 1
        assert phases.is_first, "traced again"


def test_the_watch_survives_its_own_errors_and_reports_them_once(monkeypatch):
    calls, warnings, stops = [], [], []

    def find(key, seconds):
        calls.append(key)
        raise ValueError("no verdict")

    monkeypatch.setattr(hangs, "timing", hangs.Timing(look_every=0.01))
    monkeypatch.setattr(hangs.tf_cluster, "find_published", find)
    monkeypatch.setattr(hangs.logger, "warning", warnings.append)
    monkeypatch.setattr(hangs.hooks, "at_end", lambda stage, stop: stops.append(stop))
    cluster = local_cluster(2, 0)
    watch = hangs.HangWatch(cluster, cluster.tasks()[0], None, Phases())
    watch.start()
    wait_until(lambda: len(calls) > 3, 60)
    stops[0]()
    assert warnings == ["the watch for stuck tasks failed (ValueError: no verdict); it looks again each second"]


def waits(**fields):
    return Report(number=2, state="waits", wait="step", steps=7, exchanges=3, waited=70, asks=True, **fields)


def judge(other, before=None, limit=1800, own=None):
    own = own or waits()
    reports = {"worker:0": own, "worker:1": other}
    earlier = {task: hangs.dataclasses.replace(report, number=1, waited=60) for task, report in reports.items()}
    found = hangs.verdict(reports, before or earlier, "worker:0", limit)
    return found and found.message, found and found.named


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Report(place="script.py:42 in load_batch"), "is at script.py:42 in load_batch"),
        (Report(), "is outside of a step"),
        (Report(activity="saving", place="script.py:4 in save"), "saves at script.py:4 in save"),
        (Report(state="data", place="script.py:42 in parse"), "waits for its data at script.py:42 in parse"),
        (Report(state="data"), "waits for data in its input pipeline"),
        (Report(state="computes", steps=7), "computes step 7"),
        (Report(state="computes", steps=1, is_first=True), "is in its first step"),
        (Report(section="upload", seconds_left=5, place="a.py:1 in f"), "is in the section 'upload' at a.py:1 in f"),
        (Report(debugs=True, place="a.py:1 in f"), "is in a debugger at a.py:1 in f"),
        (Report(is_silent=True, place="a.py:1 in f"), "reports no more, and was at a.py:1 in f"),
    ],
)
def test_a_wait_is_warned_about(other, words, monkeypatch):
    warnings = []
    monkeypatch.setattr(hangs.logger, "warning", warnings.append)
    assert hangs.warn({"worker:0": waits(), "worker:1": other}, "worker:0", 1800)
    assert warnings == [
        f"worker:0 has waited 70 s for worker:1, which {words}; the job goes on (Trainer(timeout_seconds=1800) is its limit)"
    ]
    assert judge(other) == (None, None)


@pytest.mark.parametrize(
    ("fields", "own", "ends"),
    [
        ({}, 1799, ""),
        ({}, 1801, "The limit is 1800 s"),
        ({"idle": 599}, 700, ""),
        ({"idle": 601}, 700, "For 601 s it has neither computed nor read nor written a file; the limit is 600 s"),
        ({"idle": 601}, 500, ""),
        ({"is_first": True}, 17_999, ""),
        ({"activity": "saving", "idle": 5_999}, 17_999, ""),
        ({"activity": "saving", "idle": 6_001}, 7_000, "the limit is 6000 s"),
        ({"activity": "building"}, 18_001, "The limit is 18000 s"),
        ({"section": "upload", "idle": 50_000}, 50_000, ""),
        ({"section": "upload", "seconds_left": 1}, 50_000, ""),
        ({"section": "upload", "seconds_left": -1}, 70, "The limit of its section, tfdist.slow(seconds=...), is over"),
        ({"debugs": True, "idle": 50_000}, 50_000, ""),
        ({"is_silent": True}, 1801, "The limit is 1800 s"),
    ],
)  # fmt: skip
def test_a_task_that_the_others_wait_for_ends_the_job_at_its_limit(fields, own, ends):
    own = hangs.dataclasses.replace(waits(), waited=own)
    message, named = judge(Report(**fields), own=own)
    if ends:
        assert ends in message and named == ["worker:1"]
    else:
        assert message is None
    assert judge(Report(**fields), limit=0, own=own)[0] is None, "0 means no limit"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (waits(), ["worker:0", "worker:1"]),
        (Report(2, "waits", "exchange", steps=6, exchanges=3, waited=70), ["worker:1"]),
        (Report(2, "waits", "step", steps=7, exchanges=3, waited=70, is_first=True), None),
        (Report(2, "computes", "step", steps=7, exchanges=3, waited=70), None),
        (Report(1, "waits", "step", steps=7, exchanges=3, waited=70), None),
    ],
    ids=["one step", "other calls", "first", "computes", "no new report"],
)  # fmt: skip
def test_a_deadlock_is_confirmed(other, named):
    message, found = judge(other)
    assert found == named, message
    assert named is None or "a deadlock, in which worker:0 has waited 70 s" in message
    earlier = {"worker:0": hangs.dataclasses.replace(waits(), number=1, waited=60)}
    assert judge(other, before={**earlier, "worker:1": Report(1, "user")})[0] is None, "one report is no proof"
    moved = hangs.dataclasses.replace(other, number=1, waited=60, transferred=10_000_000)
    assert judge(other, before={**earlier, "worker:1": moved})[0] is None, "bytes still arrive"


def test_a_task_that_computes_beside_its_wait_is_not_blamed():
    reports = {"worker:0": waits(), "worker:1": Report(state="computes"), "worker:2": Report()}
    assert list(hangs.awaited_tasks(reports, "worker:0")) == ["worker:2"]
