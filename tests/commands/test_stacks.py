"""`tfdist stacks`: what it shows of running, stopped and ended tasks, and what it refuses."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.multiprocess.waiting import wait_until
from tfdist import __main__ as command

PROGRAM = """
import sys, time
from tfdist.runtime import flight_record, stacks

def load_batch():
    print("ready", flush=True)
    time.sleep(600)

stacks.listen(sys.argv[1])
ring = flight_record.ring
ring.open(sys.argv[1])
for _ in range(int(sys.argv[2])):
    ring.end(ring.begin("gather", 16))
if sys.argv[3] == "waits":
    ring.begin("step 12: 3 collectives", 4000)
load_batch()
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a task: its name, number of ended collectives, and whether it waits in another."""
    script, processes = tmp_path / "script.py", []
    script.write_text(PROGRAM)

    def start(*words):
        environ = {**os.environ, "TFDIST_LOGS": str(tmp_path / "logs"), "PYTHONPATH": os.getcwd()}
        process = subprocess.Popen([sys.executable, script, *map(str, words)], env=environ, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def run(capsys, *words):
    code = command.main(["tfdist", "stacks", *map(str, words)])
    return code, *capsys.readouterr()


def test_it_names_the_task_that_is_behind_and_its_line(capsys, tmp_path, start):
    start("worker-0", 244, "waits")
    start("worker-1", 244, "runs")
    time.sleep(1.1)  # a wait is one of more than a second
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    first, second, behind, *others = out.splitlines()
    assert first.startswith("worker:0  waits ") and "in step 12: 3 collectives" in first
    assert second.startswith("worker:1  runs, in no collective at ") and "script.py:7 in load_batch" in second
    assert behind.startswith("behind: worker:1 (collective 244 of 245) at ")
    shown = "\n".join(others)
    assert "worker:0: the last collectives" in shown and "244  gather " in shown and "16 bytes  done" in shown
    assert "worker:1: the stacks of all threads" in shown and "in load_batch" in shown
    assert "the stacks" not in run(capsys, tmp_path / "logs", "--brief", "--last=1")[1]


def test_a_stopped_task_and_an_ended_one_are_told_apart(capsys, tmp_path, start):
    stopped, ended = start("worker-0", 1, "runs"), start("worker-1", 1, "runs")
    ended.kill()
    ended.wait()
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: pathlib.Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T", 10)
    code, out, _ = run(capsys, tmp_path)
    assert (code, out.splitlines()[:2]) == (0, ["worker:0  stopped", "worker:1  ended"])
    stopped.kill()
    stopped.wait()
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (1, "") and "no task of" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Usage: tfdist stacks WORKDIR"),
        (["missing"], "'missing' is not a folder"),
        (["."], "'.' holds no task's file of stacks"),
        ([".", "--last=-1"], "--last"),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and said in err
