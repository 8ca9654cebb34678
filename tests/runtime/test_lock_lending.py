"""A thread that waits with the interpreter's lock lends it to the others; nothing is left of that afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers.launched_job import until

# `wait` keeps the lock, as `PyDLL` does, until something is in the pipe: "lent" from a thread that needs the lock, or, should the
# lock not be lent, "late" from another process.
PROGRAM = """
import ctypes, os, signal, subprocess, sys, threading, types

import psutil
from tfdist.runtime.lock_lending import LockLender

libc = ctypes.PyDLL(None)
read, write = os.pipe()
late = subprocess.Popen(["sh", "-c", "sleep $0; printf late", sys.argv[1]], stdout=write, stderr=subprocess.DEVNULL)

def wait():
    text = ctypes.create_string_buffer(4)
    assert libc.read(read, text, 4) == 4
    return text.value.decode()

module = types.SimpleNamespace(wait=wait)
lender = LockLender(module, ["wait"])

def answer():
    while not running.is_set():
        pass
    os.write(write, b"lent")

def ask(_=None):
    running.clear()
    threading.Thread(target=answer, daemon=True).start()
    running.set()
    return module.wait()

running = threading.Event()
"""
CASES = {
    "the main thread": "with lender: print(ask())",
    "another thread": """
with lender:
    asking = threading.Thread(target=lambda: print(ask()))
    asking.start()
    asking.join()
""",
    "many calls": "with lender: print({ask() for _ in range(5)}.pop())",
    "none after it": """
with lender: ask()
os.kill(os.getpid(), signal.SIGURG)  # ignored again
assert module.wait is wait
assert not any("lock_lending.py" in each.cmdline()[-3] for each in psutil.Process().children() if each.pid != late.pid)
print("lent")
""",
    "Ctrl-C": """
answer = lambda: (os.kill(os.getpid(), signal.SIGINT), os.write(write, b"lent"))
try:
    with lender: ask()
except KeyboardInterrupt:
    print("lent")
""",
}


def run(code: str, late: str = "20") -> str:
    program = f"{PROGRAM}\n{code}\nsys.stdout.flush()\nlate.kill()\n"
    return subprocess.run(
        [sys.executable, "-c", program, late], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.parametrize("case", CASES)
def test_the_lock_is_lent(case):
    assert run(CASES[case]) == "lent\n"


def test_without_a_lender_no_other_thread_runs():
    assert run("print(ask())", late="1") == "late\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_its_parent(number):
    program = f"{PROGRAM}\nlate.kill()\nlate.wait()\nlender.start()\nprint('started', flush=True)\nwait()"
    with subprocess.Popen([sys.executable, "-c", program, "20"], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "started\n"
            (child,) = psutil.Process(parent.pid).children()
            until(child.cmdline, 20)  # the kernel closes files before it sets a new program's arguments
            assert child.cmdline()[3].endswith("lock_lending.py")
            os.kill(parent.pid, number)
            assert parent.wait(20) == -number
        finally:
            parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20)
