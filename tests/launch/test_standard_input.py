"""`breakpoint()` and `input()` in tasks: answered with --stdin, and one sentence without. Real processes, pipes and terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.launched_job import PRELUDE, imported
from tests.helpers.terminal import Terminal
from tfdist.cluster import TaskSpec
from tfdist.launch.standard_input import StandardInput

DEBUGGED = """
if TASK["index"] == 0:
    breakpoint()
print("the end of", TASK["index"])
"""
# As a training does, it imports Keras, so that a warm spare forks it.
FORKED = "is_forked = 'keras' in sys.modules\nimport keras\nprint('forked', is_forked)\n"
SENTENCE = 'Tasks have no terminal: run python script.py, or Trainer("mirrored", devices=2), or tfdist launch --stdin=worker:0 ...'


def launch(folder, code, *flags, typed=b""):
    """Returns the exit code and the output of a launcher whose standard input is a pipe."""
    (folder / "script.py").write_text(PRELUDE + imported("tfdist") + code)
    command = [sys.executable, "-m", "tfdist.launch", "--workers=2", *flags, "--", sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=folder, input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150
    )
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize("before", ["", FORKED], ids=["spawned", "forked"])
def test_a_breakpoint_reads_the_launchers_input(tmp_path, before):
    code, output = launch(tmp_path, before + DEBUGGED, "--stdin=worker:0", typed=b"p 6*7\nc\n")
    assert code == 0, output
    assert "[worker:0] (Pdb) 42\n" in output
    assert output.count("] the end of") == 1 and "(Pdb) the end of 0" in output
    assert output.count("forked True") == 2 * bool(before)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (DEBUGGED, "BdbQuit"),
        ("input('Which rate? ')", "EOFError: EOF when reading a line"),
    ],
    ids=["breakpoint", "input"],
)
def test_without_input_one_sentence_says_what_to_do(tmp_path, code, reason):
    code = f"if TASK['index']:\n    sleep_for_ever()\n{code}"
    status, output = launch(tmp_path, code, "--max_restarts=2")
    assert status == 1
    assert output.count(SENTENCE) == 1 and "Traceback" not in output and "restart 1/" not in output
    assert f"tfdist: worker:0 failed with exit code 1: {reason}; it would ask for input again; ending all" in output
    assert "Traceback" in (tmp_path / "logs/worker-0.log").read_text()


def test_a_breakpoint_in_a_task_of_a_local_training(tmp_path):
    """The command reports it as an error of the configuration, without a traceback."""
    (tmp_path / "config.py").write_text(
        "import os, tfdist\ndef get_config():\n    if 'TF_CONFIG' in os.environ:\n        breakpoint()\n"
        "    return tfdist.TrainConfig(epochs=1, global_batch_size=64)\n"
    )
    words = ["train", "--config=config.py", "--workdir=run", "--config.cluster.workers=2", "--config.max_restarts=2"]
    words += ["--config.strategy.name=multi_worker_mirrored", "--config.cluster.warm=0"]
    command = [sys.executable, "-m", "tfdist", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2, done.stderr
    assert re.sub("worker:1", "worker:0", done.stdout).count(SENTENCE) == 1, done.stdout


def test_the_user_of_a_debugger_ends_the_job(tmp_path):
    status, output = launch(tmp_path, DEBUGGED, "--stdin=worker:0", "--max_restarts=2", typed=b"q\n")
    assert status == 1
    assert "no terminal" not in output and "Traceback" not in output and "restart 1/" not in output


def test_the_end_of_the_input_reaches_the_task(tmp_path):
    code = "print('all', len(sys.stdin.read()))"
    status, output = launch(tmp_path, code, "--stdin=worker:1", typed=b"x" * 300_000)
    assert status == 0
    assert "[worker:1] all 300000\n" in output and "[worker:0] all 0\n" in output


def test_a_task_that_does_not_read_does_not_stop_the_launcher(tmp_path):
    assert launch(tmp_path, "print('done')", "--stdin=worker:1", typed=b"x" * 300_000)[0] == 0


def test_another_task_is_an_error(tmp_path):
    status, output = launch(tmp_path, "", "--stdin=worker:2")
    assert (status, output) == (2, "--stdin must be one of worker:0, worker:1. Received: 'worker:2'.\n")


def test_a_restarted_task_reads_on(tmp_path):
    code = """
line = sys.stdin.buffer.raw.readline()
print("read", line, flush=True)
if line == b"1\\n":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = launch(tmp_path, code, "--stdin=worker:0", "--max_restarts=1", typed=b"1\n2\n")
    assert status == 0, output
    assert "read b'1\\n'" in output and "read b'2\\n'" in output


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(code, before=()):
        (tmp_path / "script.py").write_text(PRELUDE + code)
        launcher = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--stdin=worker:0", "--"]
        opened.append(Terminal([*before, *launcher, sys.executable, "script.py"], tmp_path, {}))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_terminal_shows_the_prompt_and_passes_on_the_answer(terminal):
    shell = terminal(DEBUGGED)
    shell.until(lambda: shell.text().endswith("[worker:0] (Pdb)") and "the end of 1" in shell.text())
    shell.type("p 6*7\n")
    shell.until(lambda: shell.text().endswith("[worker:0] 42\n[worker:0] (Pdb)"))
    shell.type("c\n")
    assert shell.wait() == 0
    assert "[worker:0] the end of 0" in shell.text()


def test_ctrl_c_at_a_prompt_ends_the_job(terminal):
    shell = terminal(DEBUGGED)
    shell.until(lambda: shell.text().endswith("[worker:0] (Pdb)") and "the end of 1" in shell.text())
    shell.type("\x03")
    assert shell.wait() == 130
    # The debugger prints that it was interrupted, and no prompt is left over.
    assert re.search(r"ending all tasks; .* are killed\n(\[worker:0\] --KeyboardInterrupt--\n)?\n*\Z", shell.text())


def test_ctrl_d_reaches_the_task(terminal):
    shell = terminal("if not TASK['index']:\n    print('Name?', end='', flush=True)\n    print(sys.stdin.read() + '!')")
    shell.until(lambda: "[worker:0] Name?" in shell.text())
    shell.type("Ada\n")
    shell.type("\x04")
    assert shell.wait() == 0
    assert "[worker:0] Ada" in shell.text()


BACKGROUND = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
launcher = subprocess.Popen(sys.argv[1:], process_group=0)
while not os.path.exists("ready"):
    time.sleep(0.01)
print("of the shell:", sys.stdin.readline(), flush=True)
os.tcsetpgrp(0, launcher.pid)
_, status = os.waitpid(launcher.pid, os.WUNTRACED)
sys.exit(70 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""


def test_in_the_background_the_launcher_leaves_the_terminal_to_the_shell(terminal):
    code = "if not TASK['index']:\n    pathlib.Path('ready').touch()\n    print('of the task:', input('? '))"
    shell = terminal(code, before=[sys.executable, "-c", BACKGROUND])
    shell.until(lambda: "[worker:0] ?" in shell.text())
    shell.type("first\n")
    shell.until(lambda: "of the shell: first" in shell.text())
    shell.type("second\n")
    assert shell.wait() == 0
    assert "of the task: second" in shell.text()


def test_other_lines_stand_above_the_prompt(terminal, tmp_path):
    shell = terminal("if TASK['index']:\n    await_file('go')\n    print('a line')\nelse:\n    input('? ')")
    shell.until(lambda: shell.text().endswith("[worker:0] ?"))
    (tmp_path / "go").write_text("go")
    shell.until(lambda: shell.text().endswith("[worker:1] a line\n[worker:0] ?"))
    shell.type("\n")
    assert shell.wait() == 0


def test_a_closed_standard_input_is_an_empty_one(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    closed = StandardInput(TaskSpec("worker", 0))
    closed.forward()
    assert os.read(closed.of(TaskSpec("worker", 0)), 1) == b""
