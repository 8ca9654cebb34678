"""A task that fails because it has lost another one: one line names the other task, and the log has the errors."""

from __future__ import annotations

import os
import signal

import psutil

from tests.helpers.launched_job import PROGRESS, until
from tfdist.cluster import local_cluster
from tools import chaos

# What a task prints that loses another one: TensorFlow's log, two tracebacks, and the lines of its shutdown.
_LOSE = f"""
import threading, traceback
{PROGRESS}
def lose(cause, remedy="", seconds=0.0):
    print("E0000 00:00:1795763964.744299 28400 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: Socket closed", flush=True)
    print("Additional GRPC error information from remote target", flush=True)
    try:
        raise RuntimeError("Socket closed")
    except RuntimeError:
        traceback.print_exc()
    progress.write(lost=progress.Loss("worker:1", cause, remedy))
    time.sleep(seconds)
    raise RuntimeError(cause + ". Start all tasks again")
"""
_CAUSE = (
    "worker:1 at host1:2222 (connection refused) has ended while worker:0 trained with it; see its log for the cause"
    + (
        " " + "x" * 150  # longer than the reason of other failures
    )
)


def shown(output):
    """Returns the lines, without those that say that a task is ready, which it may or may not be in time."""
    return [line for line in output.splitlines() if not line.endswith("] ready")]


def test_one_line_names_the_other_task_the_consequence_and_the_remedy(job):
    """TensorFlow's shutdown takes seconds, longer than the launcher holds a traceback back: none is shown."""
    code = f"""
if TASK["index"] == 0:
    lose({_CAUSE!r}, seconds=4)
sleep_for_ever()
"""
    assert job.run(_LOSE + code, "--workers=2") == 1
    (line,) = shown(job.output())
    assert line.startswith(f"tfdist: {_CAUSE}; ending all tasks. Full output: ") and "worker-0.log. " in line
    assert "; max_restarts starts the tasks again by itself, from the last backup" in line
    assert job.log("worker-0").count("Traceback") == 2 and "RingReduce" in job.log("worker-0")


def test_a_remedy_of_its_own_is_the_only_one(supervise):
    code = """
if TASK["index"] == 0:
    lose("worker:1 has finished, and worker:0 waits for it in evaluate at x.py:9", "call it on every worker")
"""
    exit_code, output = supervise(_LOSE + code, local_cluster(2))
    assert exit_code == 1
    (line,) = shown(output)
    assert line.endswith("worker-0.log"), line
    assert line.startswith(
        "tfdist: worker:1 has finished, and worker:0 waits for it in evaluate at x.py:9: call it on every worker; ending"
    )


def test_a_restart_names_the_other_task(supervise):
    code = """
if progress.restarts():
    sys.exit(0)
if TASK["index"] == 0:
    progress.write(done=412, saved=400)
    lose("worker:1 at host1:2222 has ended")
sleep_for_ever()
"""
    exit_code, output = supervise(_LOSE + code, local_cluster(2), max_restarts=3)
    assert exit_code == 0
    line = shown(output)[0]
    said = (
        "tfdist: worker:1 lost at step 412 (worker:1 at host1:2222 has ended); restart 1/3 from step 400. Full output: "
    )
    assert line.startswith(said), line


def test_a_connection_that_broke_briefly_is_shown_while_its_task_runs(job):
    code = """
print("E0000 00:00:1795763964.744299 28400 x.cc:291] UNAVAILABLE: Socket closed", flush=True)
print("going on", flush=True)
await_file("seen")
"""
    process = job.start(code)
    until(lambda: "[worker:0] going on" in job.output())
    assert process.poll() is None
    assert job.output().index("UNAVAILABLE") < job.output().index("going on")
    (job.folder / "seen").write_text("yes")
    assert process.wait(timeout=60) == 0


def test_the_cause_is_named_and_not_the_task_that_lost_it_if_both_have_ended(job):
    """The launcher stands still while they end, and sees both at once; the one that lost the other has failed first."""
    code = """
print("ready", flush=True)
await_file("go")
if TASK["index"] == 0:
    lose("worker:1 at host1:2222 has ended")
while not progress.read(os.environ[progress.FOLDER], "worker-0").lost:
    time.sleep(0.01)
raise ValueError("the cause")
"""
    process = job.start(_LOSE + code, "--workers=2")
    until(lambda: job.output().count("] ready") == 2)
    tasks = [psutil.Process(pid) for _, pid, _ in chaos.tasks(process.pid)]
    assert len(tasks) == 2
    os.kill(process.pid, signal.SIGSTOP)
    (job.folder / "go").write_text("yes")
    until(lambda: all(not task.is_running() or task.status() == psutil.STATUS_ZOMBIE for task in tasks))
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(timeout=60) == 1
    assert "tfdist: worker:1 failed with exit code 1: ValueError: the cause; ending all tasks" in job.output()
    assert "worker:1 at host1:2222 has ended" not in job.output()
