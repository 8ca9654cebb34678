"""The output and the logs of the supervisor, with small scripts in place of training runs."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from tests.helpers import full_disk
from tests.helpers.launched_job import PROGRESS, until
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options


def test_lines_are_shown_behind_the_task_as_a_terminal_would_and_logged_as_they_came(supervise, tmp_path):
    """TensorFlow's log, and a traceback until the task ends well, are held back; escape codes go to the log alone."""
    chatter = "2026-01-31 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] optimized\n"
    printed = f"10%\r20%\r\nwhole\n\n{chatter}a\x1b[31mred\x1b[0m \x1b[2K\x1b]0;title\x07x\x1b[?25l\n"
    printed += "Traceback (most recent call last):\nValueError: handled\nno newline at the end"
    exit_code, output = supervise(f"sys.stdout.write({printed!r})", local_cluster(1))
    assert exit_code == 0
    shown = ["20%", "whole", "ared x", "Traceback (most recent call last):", "ValueError: handled"]
    assert output.splitlines() == [f"[worker:0] {line}" for line in [*shown, "no newline at the end"]]
    assert (tmp_path / "logs" / "worker-0.log").read_bytes().decode() == printed


@pytest.mark.parametrize("what", ["", f"{PROGRESS}progress.write()  # as a strategy does"])
def test_tasks_that_never_use_tfdist_are_said_to_run_alone(supervise, what):
    exit_code, output = supervise(what, local_cluster(2))
    assert exit_code == 0
    assert ("tfdist: no task has created a tfdist.Trainer or strategy: unless" in output) == (not what)


def test_the_first_failure_is_shown_once_and_its_consequences_not_at_all(supervise, tmp_path):
    code = """
if TASK["index"] == 1:
    await_file("logs/worker-0.log")
    raise ValueError("the cause")
def fail(*args):
    raise RuntimeError("the consequence")
signal.signal(signal.SIGTERM, fail)
sleep_for_ever()
"""
    exit_code, output = supervise(code, local_cluster(2))
    assert exit_code == 1
    assert output.count("Traceback") == 1
    assert "[worker:1] ValueError: the cause\n" in output
    assert "tfdist: worker:1 failed with exit code 1, last line: ValueError: the cause; ending" in output
    assert "the consequence" not in output
    assert "RuntimeError: the consequence" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_a_traceback_that_its_task_survives_is_shown_while_it_runs(job):
    code = """
import traceback
try:
    raise ValueError("handled")
except ValueError:
    traceback.print_exc()
print("going on", flush=True)
await_file("seen")
"""
    process = job.start(code)
    until(lambda: "[worker:0] going on" in job.output())
    assert process.poll() is None
    assert job.output().index("[worker:0] ValueError: handled") < job.output().index("going on")
    (job.folder / "seen").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert job.output().count("handled") == 2  # the line of code, and the error


def test_a_reader_that_goes_away_neither_ends_nor_blocks_the_run(job):
    process = job.start("await_file('go'); [print('x' * 99) for _ in range(9999)]", stdout=subprocess.PIPE)
    process.stdout.close()
    (job.folder / "go").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert len(job.log("worker-0")) == 999900


@pytest.mark.full  # what Keras prints: test_process.py
def test_a_progress_bar_is_shown_when_it_is_full(job):
    code = """
import keras
bar = keras.utils.Progbar(3)
for step in range(4):
    bar.update(step)
"""
    assert job.run(code) == 0
    lines = job.output().splitlines()
    assert (
        len(lines) == 1 and lines[0].startswith("[worker:0] 3/3 ") and "\x1b" not in lines[0] and "\x08" not in lines[0]
    )


def test_repeated_warnings_are_shown_once_and_counted_and_prints_are_all_shown(supervise, tmp_path):
    code = """
import logging, warnings
warnings.simplefilter("always")
for _ in range(3):
    warnings.warn("slow")
    print('    warnings.warn("slow")?')
    logging.warning("odd")
    print("mine")
print("E0000 00:00:1795.6 1998 x.cc:5] bad", file=sys.stderr)
"""
    exit_code, output = supervise(code, local_cluster(2))
    assert exit_code == 0
    lines = output.splitlines()
    bare = [line.split("] ", 1)[1] for line in lines if line.startswith("[worker:")]
    assert sum("UserWarning: slow" in line for line in bare) == 1
    assert bare.count('  warnings.warn("slow")') == 1 and bare.count('    warnings.warn("slow")?') == 6
    assert bare.count("WARNING:root:odd") == 1 and bare.count("mine") == 6
    assert sum("bad" in line for line in bare) == 2
    counts = [line for line in lines if "more line" in line]
    assert [line.split(" like: ")[0] for line in counts] == [f"tfdist: {x}" for x in ("5 more lines", "5 more lines")]
    assert counts[1].endswith("] WARNING:root:odd")
    assert (tmp_path / "logs" / "worker-1.log").read_text().count("WARNING:root:odd") == 3


def test_what_a_script_logs_is_shown(supervise):
    code = """
from absl import logging
logging.set_verbosity("info")
logging.info("mine")
logging.warning("mine, too")
"""
    exit_code, output = supervise(code, local_cluster(1))
    assert exit_code == 0
    first, second = output.splitlines()
    assert first.endswith("mine") and second.endswith("mine, too")


def test_logs_of_the_run_before_are_put_away(supervise, tmp_path):
    assert supervise("print('first')", local_cluster(2))[0] == 0
    assert supervise("print('second')", local_cluster(1))[0] == 0
    logs = tmp_path / "logs"
    assert (logs / "worker-0.log").read_text() == "second\n"
    assert (logs / "before" / "worker-1.log").read_text() == "first\n"
    assert not (logs / "worker-1.log").exists()


@pytest.mark.parametrize("cause", ["No space left on device", "expected a regular file, and found a symbolic link to "])
def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, cause):
    folder, is_full = tmp_path / "logs", "space" in cause
    folder.mkdir()
    shown = io.BytesIO()
    with full_disk.mounted(folder, 4096) if is_full else contextlib.nullcontext():
        if is_full:
            (folder / "fills").write_bytes(bytes(4096))
        else:
            (folder / "worker-0.log").symlink_to("/dev/full")
        launcher = Launcher(Options([sys.executable, "-c", "print('on')"], local_cluster(1), folder), output=shown)
        monkeypatch.setattr("tfdist.launch.launcher.set_logs_aside", lambda *_: None)  # or the link would go
        assert launcher.run() == 0
    assert b"[worker:0] on\n" in shown.getvalue()
    assert f"cannot write {folder}/worker-0.log: {cause}".encode() in shown.getvalue()
