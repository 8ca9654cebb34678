"""Work is done once in a test run, by whichever process asks first; the fork server ends with the process that began the run."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import fork_server
from tests.helpers.launched_job import until
from tests.helpers.once import Once

ASK = """
import os, pathlib, sys, time
from tests.helpers.once import Once

def fill(folder):
    with open("filled", "a") as file:
        file.write("once\\n")
    time.sleep(0.5)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    assert sys.argv[1] == "well", "it fails"
    (folder / "result").write_text("done")

print((Once(pathlib.Path("root")).folder("some work", fill) / "result").read_text())
"""


def ask(folder, *how):
    """Has a process for each of `how` ask for the same work; returns their exit codes and output."""
    environ = {**os.environ, "PYTHONPATH": str(fork_server.ROOT)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    for each in how:
        processes.append(subprocess.Popen([sys.executable, "-c", ASK, each], cwd=folder, env=environ, **both))
        until(lambda: (folder / "filled").exists(), 30)  # by the first one
    shown = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], shown


def test_several_processes_share_what_the_first_has_done(tmp_path):
    codes, shown = ask(tmp_path, "well", "well", "well")
    assert codes == [0, 0, 0] and shown == ["done\n"] * 3
    assert (tmp_path / "filled").read_text() == "once\n"


def test_what_has_failed_fails_for_all(tmp_path):
    codes, shown = ask(tmp_path, "badly", "well")
    assert codes == [1, 1]
    assert "AssertionError: it fails" in shown[0] and "it fails" in shown[1] and "some work failed before" in shown[1]
    assert (tmp_path / "filled").read_text() == "once\n"


def test_what_a_killed_process_began_the_next_one_does(tmp_path):
    codes, shown = ask(tmp_path, "kill", "well")
    assert codes == [-9, 0] and shown[1] == "done\n"


def test_the_wait_for_another_process_has_a_limit(tmp_path):
    waiting = Once(tmp_path, limit=0.2)

    def fill(folder):
        with pytest.raises(TimeoutError, match=r"some work: another process has not ended it in 0\.2 seconds"):
            waiting.folder("some work", fill)

    waiting.folder("some work", fill)


def test_work_that_overlaps_is_divided(tmp_path):
    once = Once(tmp_path)
    assert once.groups("work", ["a", "b"]) == [["a", "b"]]
    assert once.groups("work", ["b", "c", "d"]) == [["a", "b"], ["c", "d"]]
    assert once.groups("work", ["d"]) == [["c", "d"]]
    assert once.groups("other", ["d"]) == [["d"]]


# A run whose server imports nothing and has a program that would sleep for long.
OWNER = """
import json, os, subprocess, sys, time
from tests.helpers import fork_server

fork_server.PRELOADED = ()
folder = fork_server.begin()
client = subprocess.Popen(fork_server.command("tests.helpers.sleeper"), stdout=subprocess.PIPE)
program = int(client.stdout.readline())
other = [sys.executable, "-c", "from tests.helpers import fork_server; print(fork_server.begin())"]
there = subprocess.run(other, capture_output=True, text=True).stdout.strip()
print(json.dumps([str(folder), there, program, client.pid]), flush=True)
time.sleep(600) if sys.argv[1] == "waits" else None
"""


@pytest.mark.parametrize("how", ["killed", "interrupted", "ends"])
def test_the_server_and_its_programs_end_with_their_run(how):
    environ = {**os.environ, "PYTHONPATH": str(fork_server.ROOT)}
    del environ[fork_server.RUN]
    command = [sys.executable, "-c", OWNER, "ends" if how == "ends" else "waits"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        folder, of_its_child, program, client = json.loads(owner.stdout.readline())
        assert of_its_child == folder, "one server for all processes of a run"
        owner.send_signal({"killed": 9, "interrupted": 2, "ends": 0}[how])
    until(lambda: not pathlib.Path(folder).exists(), 30)
    for process in (program, client):
        until(lambda number=process: not running(number), 30)


def running(process):
    """Returns True if a process runs. One that has ended, and for which nobody waits, does not."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
