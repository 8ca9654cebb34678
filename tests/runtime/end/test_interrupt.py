"""Ctrl-C for commands whose main thread does not come back to Python."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The main thread waits in C for a lock that it holds: no signal interrupts that. glibc makes 2 of the lock's first number, which is
# 1 while it is only held, when somebody begins to wait: not before that does the program say that it is ready.
PROGRAM = """
import ctypes, sys, threading, time
from tfdist.runtime.end import process_end
process_end.after_imports()
process_end.limit_interrupts()
if sys.argv[1] == "preemption":
    process_end.Preemption().listen()
lock = ctypes.create_string_buffer(64)
def tell():
    while ctypes.c_int.from_buffer(lock).value != 2:
        time.sleep(0.01)
    print("ready", flush=True)
threading.Thread(target=tell, daemon=True).start()
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("listener", ["preemption", pytest.param("none", marks=pytest.mark.full)])
def test_a_command_that_is_stuck_ends_within_seconds_of_ctrl_c(presses, listener):
    command = [sys.executable, "-c", PROGRAM, listener]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            for _ in range(presses):
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 128 + signal.SIGINT
            assert process.stderr.read() == b"tfdist: ended by Ctrl-C (SIGINT)\n"
        finally:
            process.kill()
