"""`tfdist stacks`: what it shows of running, stopped and ended tasks, and what it refuses."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.multiprocess.waiting import wait_until
from tfdist import __main__ as command

PROGRAM = """
import sys, time
from tfdist.runtime.report import stacks

def load_batch():
    print("ready", flush=True); time.sleep(600)  # one line, which the signal finds whenever it comes

stacks.listen(sys.argv[1])
load_batch()
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a task of a name."""
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


def test_it_shows_the_line_of_each_task_and_its_stacks(capsys, tmp_path, start):
    start("worker-0")
    start("worker-1")
    for folder in (tmp_path, tmp_path / "logs"):
        code, out, _ = run(capsys, folder)
        assert code == 0
        first, second = re.split("^(?=worker:1)", out, flags=re.MULTILINE)
        for number, shown in enumerate((first, second)):
            assert re.match(rf"worker:{number} at \S*script.py:6 in load_batch\n", shown), out
            assert re.search('  File ".*script.py", line 6 in load_batch', shown), out


def test_a_stopped_task_and_an_ended_one_are_told_apart(capsys, tmp_path, start):
    stopped, ended = start("worker-0"), start("worker-1")
    ended.kill()
    ended.wait()
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: pathlib.Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T", 10)
    code, out, _ = run(capsys, tmp_path)
    assert (code, out) == (0, "worker:0\nno answer: it is stopped, or ends\n")
    stopped.kill()
    stopped.wait()
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (1, "") and "no task of" in err


def test_links_and_folders_are_skipped(capsys, tmp_path, start):
    start("worker-0")
    (tmp_path / "worker-1.stacks").symlink_to("/dev/zero")
    (tmp_path / "worker-2.stacks").mkdir()
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "\nworker:0 at " in out
    assert f"{tmp_path}/worker-1.stacks is skipped: expected a regular file, and found a link" in out
    assert f"{tmp_path}/worker-2.stacks is skipped: expected a regular file, and found a folder" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Usage: tfdist stacks WORKDIR"),
        (["missing"], "'missing' is not a folder"),
        (["."], "'.' holds no task's file of stacks"),
        ([".", "--last=1"], "--last"),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and said in err
