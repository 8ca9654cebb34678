"""A launcher whose output nobody reads: a pipe, a stopped pager, a terminal. It heeds signals, and the tasks' logs go on."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.helpers.launched_job import PRELUDE, Job, until
from tests.helpers.terminal import Terminal

CHATTER = "while True: print('chatter ' * 12, flush=True)"


def grows(log: pathlib.Path, beyond: int) -> Callable[[], bool]:
    return lambda: log.exists() and log.stat().st_size > beyond


@pytest.mark.parametrize("command", [CHATTER, pytest.param(["yes"], marks=pytest.mark.full)], ids=["script", "yes"])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_pipe_that_nobody_reads_keeps_neither_signals_nor_logs(job: Job, command, number):
    reads, writes = os.pipe()
    try:
        process = job.start(command, "--workers=2", "--grace_seconds=20", stdout=writes)
        for task in range(2):
            until(grows(job.folder / "logs" / f"worker-{task}.log", 1 << 19))  # a pipe holds an eighth of it
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
        assert not job.alive()
    finally:
        os.close(reads)
        os.close(writes)


def test_a_reader_that_comes_back_is_told_how_many_lines_it_has_missed(job: Job):
    lines = 120_000
    code = f"for number in range({lines}): print(number, 'x' * 94)\npathlib.Path('written').touch()\nawait_file('go')\nprint('last words')"
    process = job.start(code, stdout=subprocess.PIPE)
    until((job.folder / "written").exists, 60)
    until(lambda: len(job.log("worker-0").splitlines()) == lines)
    shown = []
    with process.stdout:
        # Before the end, at which the launcher waits for its reader for some seconds only.
        while not shown or not shown[-1].startswith(f"[worker:0] {lines - 1} x"):
            shown.append(process.stdout.readline().decode().rstrip("\n"))
            assert shown[-1], "it has ended"
        (job.folder / "go").write_text("go")
        shown += process.stdout.read().decode().splitlines()
    assert process.wait(timeout=60) == 0
    left_out = [line for line in shown if "dropped here" in line]
    assert len(left_out) == 1 and left_out[0].endswith(
        "lines of tasks were dropped here, as the reader was too slow; logs has them"
    )
    missed = int(left_out[0].split()[1])
    assert missed > 0 and missed + len(shown) == lines + 2  # that line, and the last words
    assert shown[0].startswith("[worker:0] 0 x") and shown[-1] == "[worker:0] last words"


@pytest.mark.full
def test_a_stopped_reader_is_waited_for_a_bounded_time_at_the_end(job: Job):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        reader.send_signal(signal.SIGSTOP)
        try:
            code = "for number in range(20_000): print(number, 'x' * 94)"
            process = job.start(code, stdout=reader.stdin.fileno())
            assert process.wait(timeout=60) == 0
            assert len(job.log("worker-0").splitlines()) == 20_000
        finally:
            reader.send_signal(signal.SIGCONT)
            reader.stdin.close()


@pytest.mark.full
def test_a_slow_reader_gets_everything(job: Job):
    # It takes longer in all than the launcher waits for a reader that takes nothing: 8 s here, as a busy machine stops this one, too.
    patient = "from tfdist.launch import output; output.LAST_WAIT = 8.0"
    process = job.start("for number in range(3000): print(number, 'x' * 94)", stdout=subprocess.PIPE, before=patient)
    shown = b""
    with process.stdout:
        while piece := os.read(process.stdout.fileno(), 20_000):  # the task has ended long before the last piece
            shown += piece
            time.sleep(0.7)
    assert process.wait(timeout=60) == 0
    assert shown.count(b"\n") == 3000 and b"left out" not in shown


@pytest.mark.parametrize("term", ["xterm", pytest.param("dumb", marks=pytest.mark.full)])
def test_a_terminal_that_nobody_reads_keeps_no_signal(tmp_path, term):
    (tmp_path / "script.py").write_text(PRELUDE + CHATTER)
    command = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", sys.executable, "script.py"]
    terminal = Terminal(command, tmp_path, {"TERM": term})
    try:
        for task in range(2):
            until(grows(tmp_path / "logs" / f"worker-{task}.log", 1 << 18))  # a terminal holds 4 KB
        ended: list[int] = []
        waiting = threading.Thread(target=lambda: ended.append(os.waitpid(terminal.pid, 0)[1]), daemon=True)
        waiting.start()
        os.kill(terminal.pid, signal.SIGTERM)
        waiting.join(60)
        assert ended and os.waitstatus_to_exitcode(ended[0]) == 143
        terminal.pid = 0
    finally:
        terminal.close()


@pytest.mark.full
def test_a_terminal_that_is_read_again_is_left_in_order(tmp_path):
    (tmp_path / "script.py").write_text(
        PRELUDE
        + "for number in range(100_000): print(number, 'x' * 60)\npathlib.Path('written').touch()\nawait_file('go')"
    )
    command = [sys.executable, "-m", "tfdist.launch", "--", sys.executable, "script.py"]
    terminal = Terminal(command, tmp_path, {})
    try:
        until((tmp_path / "written").exists, 60)
        terminal.until(lambda: "[worker:0] 99999 " in terminal.output, 200)
        (tmp_path / "go").write_text("go")
        assert terminal.wait() == 0
        assert "lines of tasks were dropped here" in terminal.output
        assert terminal.screen.cursor_is_shown and "task  " not in terminal.text()
    finally:
        terminal.close()


@pytest.mark.full
def test_closed_outputs_and_full_disks_end_no_run(tmp_path):
    for end in (">&-", "> /dev/full", ">&- 2>&- <&-", "| head -n 1"):
        shell = (
            f"set -o pipefail; {sys.executable} -m tfdist.launch -- bash -c 'for i in 1 2 3; do echo hi; done' {end}"
        )
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, end
        assert "Traceback" not in done.stderr, done.stderr
        assert (tmp_path / "logs" / "worker-0.log").read_text() == "hi\n" * 3
