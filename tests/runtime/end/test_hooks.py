"""The calls at the end of a process run in the order of their stages, whatever one of them does, and only in the process that has registered them."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDER = """
import atexit, sys
atexit.register(print, "a library's")
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.end.hooks import Stage, at_end

def fail(error):
    at_end(Stage.CONNECTIONS, print, "registered late")
    raise error

at_end(Stage.FILES, print, "files")
at_end(Stage.CONNECTIONS, print, "connections")
at_end(Stage.PEERS, print, "peers")
at_end(Stage.PEERS, fail, SystemExit("wrong"))
at_end(Stage.PEERS, print, "peers")
at_end(Stage.PEERS, print, "peers, later strategy")
at_end(Stage.WATCH, print, "watch")
at_end(Stage.REPORT, print, "report")
{}
"""
LINES = ["report", "watch", "peers, later strategy", "peers", "files", "registered late", "connections", "a library's"]


@pytest.mark.parametrize("end", ["sys.exit(3)", "process_end.leave(3)"])
def test_the_stages_follow_one_another_also_after_an_error(end):
    done = subprocess.run([sys.executable, "-c", ORDER.format(end)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (3, LINES)
    assert done.stderr.endswith("SystemExit: wrong\n")


FORK = """
import os, sys
from tfdist.runtime.end.hooks import Stage, at_end, in_child

def fail():
    raise ValueError("wrong")

at_end(Stage.PEERS, print, "the parent ends")
for function in (fail, lambda: print("the child begins")):
    in_child(function)
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    at_end(Stage.PEERS, print, "the child ends")
sys.exit(0)
"""


def test_a_forked_child_does_not_run_what_its_parent_has_registered_for_the_end():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["the child begins", "the child ends", "the parent ends"]
    assert done.stderr.endswith("ValueError: wrong\n")


FOLDERS = """
import os, sys
from tfdist.runtime.folders.temporary import temporary_folder

before = temporary_folder()
print(before.__enter__(), flush=True)
if not os.fork():
    own = temporary_folder()
    own.__enter__()
    sys.exit(0)
os.wait()
print(os.listdir(os.path.dirname(os.environ["TMPDIR"] + "/")))
"""


def test_each_process_removes_its_own_temporary_folders(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FOLDERS], capture_output=True, text=True, timeout=60, env={"TMPDIR": str(tmp_path)}
    )
    folder, left = done.stdout.splitlines()
    assert left == str([folder.rpartition("/")[2]]), done.stderr
    assert not [*tmp_path.iterdir()]
