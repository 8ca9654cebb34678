"""Ctrl-C for commands whose main thread does not come back to Python."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

# The main thread waits in C for a lock that it holds: no signal interrupts that.
PROGRAM = """
import ctypes, sys
from tfdist.runtime import interrupt, preemption
interrupt.after_imports()
interrupt.listen()
if sys.argv[1] == "preemption":
    preemption.Preemption().listen()
lock = ctypes.create_string_buffer(64)
print("ready", flush=True)
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
            time.sleep(1)  # until it is in C
            for _ in range(presses):
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 128 + signal.SIGINT
            assert process.stderr.read() == b"tfdist: ended by Ctrl-C (SIGINT)\n"
        finally:
            process.kill()
