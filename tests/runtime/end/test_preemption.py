"""SIGTERM is heard wherever the main thread is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import pytest

PRELUDE = """
import sys, time
from tfdist.runtime.end.process_end import Preemption
heard = Preemption(grace_seconds={grace})
heard.listen()
heard.training = {training}
print("ready", flush=True)
"""


@contextlib.contextmanager
def started(program, grace=60.0, training=False):
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(grace=grace, training=training) + program], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(program, **how):
    with started(program, **how) as process:
        return process.wait(timeout=60)


def test_outside_of_a_training_it_ends_the_process_at_once():
    assert run("time.sleep(60)") == 75


def test_in_a_training_it_is_noted():
    assert run("while not heard.requested: time.sleep(0.01)\nsys.exit(3)", training=True) == 3


def test_a_training_that_does_not_end_within_the_grace_is_given_up(capfd):
    assert run("time.sleep(60)", grace=0.5, training=True) == 75
    assert "no backup was completed within 0.45 s: steps after the last backup are lost" in capfd.readouterr().err


def test_a_process_that_still_runs_after_its_training_says_why_it_ends(capfd):
    program = "while not heard.requested: time.sleep(0.01)\nheard.training = False\ntime.sleep(60)"
    assert run(program, grace=0.5, training=True) == 75
    assert (
        "this process received SIGTERM 0.45 s ago, its training has ended, and it still runs" in capfd.readouterr().err
    )


def test_it_is_heard_while_the_main_thread_is_not_in_python():
    # Interrupted, `sleep` of C returns at once, and is called again without a look at Python's handlers.
    assert run("import ctypes; libc = ctypes.CDLL(None)\nlibc.usleep(900000); libc.pause(); time.sleep(60)") == 75


def test_a_second_one_ends_the_process_at_once():
    program = "while not heard.requested: time.sleep(0.01)\nprint('noticed', flush=True)\ntime.sleep(600)"
    for _ in range(10):
        with started(program, training=True) as process:
            assert process.stdout.readline() == b"noticed\n"
            process.send_signal(signal.SIGTERM)  # the same one, through the supervisor
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.5)
                # A busy machine may have brought the second one a second later, when it is another one.
                assert time.monotonic() - process.sent > 1
                continue
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
            return
    pytest.fail("this machine needs a second for two signals, ten times in a row")


def test_a_forked_process_keeps_its_own_signals():
    program = """
import os, signal
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"forked")  # what the child does at its beginning is done
    time.sleep(60)
os.read(read, 6)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.2)
assert not second.requested
sys.exit(4)
"""
    process = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(grace=60.0, training=True) + "second = heard" + program], timeout=60
    )
    assert process.returncode == 4


def test_a_sigterm_to_a_process_that_has_just_been_forked_ends_it():
    program = f"""
import os, signal
read, write = os.pipe()
os.register_at_fork(after_in_child=lambda: os.read(read, 1))  # the child's first call: it waits for the signal
{PRELUDE.format(grace=60.0, training=True)}
child = os.fork()
if not child:
    time.sleep(600)
os.kill(child, signal.SIGTERM)
os.write(write, b"s")
end = time.monotonic() + 20
while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
    time.sleep(0.01)
if not ended[0]:
    os.kill(child, signal.SIGKILL)
assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGTERM
sys.exit(4)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 4


@pytest.mark.parametrize("taken", ["signal.SIG_DFL", "signal.SIG_IGN", "lambda *_: None"])
def test_it_is_taken_back_from_whoever_took_it(taken):
    assert run(f"import signal; signal.signal(signal.SIGTERM, {taken}); heard.listen(); time.sleep(60)") == 75


def test_an_event_loop_has_its_signals_back_after_a_training():
    program = """
import asyncio, os, signal
async def work():
    loop = asyncio.get_running_loop()
    heard_by_loop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, heard_by_loop.set)
    again = Preemption(grace_seconds=60)
    again.listen()
    again.give_back()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(heard_by_loop.wait(), 50)
    assert not again.requested
signal.set_wakeup_fd(-1)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
asyncio.run(work())
sys.exit(5)
"""
    code = "import sys\nfrom tfdist.runtime.end.process_end import Preemption\n" + program
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 5


def test_a_handler_of_ones_own_is_there_again_after_a_training():
    program = """
import os, signal, sys
from tfdist.runtime.end.process_end import Preemption
signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
heard = Preemption(grace_seconds=60)
heard.listen()
heard.give_back()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 6
