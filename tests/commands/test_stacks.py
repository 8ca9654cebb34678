"""`tfdist stacks`: what it shows of running, stopped and ended tasks, and what it refuses."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.multiprocess.waiting import wait_until
from tfdist import __main__ as command

PROGRAM = """
import os, sys, time, tfdist
from tfdist.runtime.report import stacks

def load_batch():
    print("ready", flush=True); time.sleep(600)  # one line, which the signal finds whenever it comes

stacks.listen(sys.argv[1])
if sys.argv[2] == "waits":  # in a step
    step = os.path.join(os.path.dirname(tfdist.__file__), "step", "execution.py")
    exec(compile("print('ready', flush=True); time.sleep(600)", step, "exec"))
load_batch()
"""

# Plants requests as another user could, and prints which ones the task answers.
REQUESTS = """
import os, pathlib, resource, tfdist
from tfdist.runtime.report import stacks

resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
stacks.listen("worker-0")
folder = pathlib.Path(os.environ["TFDIST_LOGS"])
request = folder / stacks.REQUEST

def answers(plant):
    before = (folder / "worker-0.stacks").stat().st_size
    plant()
    stacks.answer_request()
    (request.rmdir if request.is_dir() else request.unlink)()
    return (folder / "worker-0.stacks").stat().st_size > before

def of_nobody():
    request.write_bytes(b"other")
    os.chown(request, 65534, -1)

print(*map(answers, (
    lambda: request.symlink_to("/dev/zero"),
    lambda: os.mkfifo(request),
    lambda: request.mkdir(),
    of_nobody if os.geteuid() == 0 else lambda: os.mkfifo(request),
    lambda: request.write_bytes(b"\\xff no text"),
)))
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a task: its name, and whether it waits in a step."""
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


def test_it_names_the_task_that_the_others_wait_for_and_its_line(capsys, tmp_path, start):
    start("worker-0", "waits")
    start("worker-1", "runs")
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    first, second, behind, *others = out.splitlines()
    assert first.startswith("worker:0  waits for others")
    assert second.startswith("worker:1  runs at ") and "script.py:6 in load_batch" in second
    assert behind.startswith("behind: worker:1 at ") and "script.py:6 in load_batch" in behind
    assert "worker:1: the stacks of all threads" in "\n".join(others)
    assert "the stacks" not in run(capsys, tmp_path / "logs", "--brief")[1]


def test_a_stopped_task_and_an_ended_one_are_told_apart(capsys, tmp_path, start):
    stopped, ended = start("worker-0", "runs"), start("worker-1", "runs")
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


def test_a_task_answers_only_requests_that_are_files_of_its_user(tmp_path):
    environ = {**os.environ, "TFDIST_LOGS": str(tmp_path / "logs"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", REQUESTS], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False"] * 4 + ["True"], done.stderr


def test_links_and_folders_are_skipped(capsys, tmp_path, start):
    start("worker-0", "runs")
    (tmp_path / "worker-1.stacks").symlink_to("/dev/zero")
    (tmp_path / "worker-2.stacks").mkdir()
    code, out, _ = run(capsys, tmp_path, "--brief")
    assert code == 0 and "\nworker:0  runs" in out
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
