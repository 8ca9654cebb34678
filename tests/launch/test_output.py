"""The output and the logs of the supervisor, with small scripts in place of training runs."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from tests.helpers import full_disk
from tests.helpers.launched_job import until
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher


def test_lines_are_shown_behind_the_task_as_a_terminal_would_and_logged_as_they_came(job):
    assert job.run(r"""sys.stdout.write("10%\r20%\r\nwhole\n\nno newline at the end")""") == 0
    assert job.output().splitlines() == [f"[worker:0] {x}" for x in ("20%", "whole", "no newline at the end")]
    assert job.log("worker-0") == "10%\r20%\r\nwhole\n\nno newline at the end"


def test_tensorflows_chatter_is_in_the_log_alone(job):
    line = "2026-01-31 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] optimized"
    assert job.run(f"print({line!r}); print('shown')") == 0
    assert job.output() == "[worker:0] shown\n"
    assert line in job.log("worker-0")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "Exception encountered when calling Sequential.call().\\n\\nInput 0 of layer 'dense' has axis -1 of 5.\\n\\n"
            "Arguments received by Sequential.call():\\n  • mask=None",
            "Input 0 of layer 'dense' has axis -1 of 5",
        ),
        (
            "Graph execution error:\\n\\nDetected at node x\\n<stack traces unavailable>\\ntoo large\\n\\t [[{{node x}}]]",
            "too large",
        ),
        ("use strategy tpu.", "use strategy tpu"),
        ("first fault.\\nsecond fault.", "first fault"),
        ("x" * 300, "x" * 185 + "..."),
    ],
)
def test_the_reason_is_the_line_that_says_something(job, message, reason):
    assert job.run(f'raise ValueError("{message}")') == 1
    assert f"failed with exit code 1: ValueError: {reason}; ending all tasks." in job.output()


@pytest.mark.parametrize("what", ["", "import tfdist; tfdist.create_strategy('multi_worker_mirrored', cluster=False)"])
def test_tasks_that_never_use_tfdist_are_said_to_run_alone(job, what):
    assert job.run(what, "--workers=2") == 0
    assert ("tfdist: no task has created a tfdist.Trainer or strategy: unless" in job.output()) == (not what)


def test_the_first_failure_is_shown_once_and_its_consequences_not_at_all(job):
    code = """
if TASK["index"] == 1:
    await_file("logs/worker-0.log")
    raise ValueError("the cause")
def fail(*args):
    raise RuntimeError("the consequence")
signal.signal(signal.SIGTERM, fail)
sleep_for_ever()
"""
    assert job.run(code, "--workers=2") == 1
    assert job.output().count("Traceback") == 1
    assert "[worker:1] ValueError: the cause\n" in job.output()
    assert "tfdist: worker:1 failed with exit code 1: ValueError: the cause; ending" in job.output()
    assert "the consequence" not in job.output()
    assert "RuntimeError: the consequence" in job.log("worker-0")


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


def test_a_traceback_of_a_task_that_succeeds_is_shown_at_its_end(job):
    assert job.run("print('Traceback (most recent call last):'); print('ValueError: handled')") == 0
    assert "[worker:0] ValueError: handled\n" in job.output()


def test_a_reader_that_goes_away_neither_ends_nor_blocks_the_run(job):
    process = job.start("await_file('go'); [print('x' * 99) for _ in range(9999)]", stdout=subprocess.PIPE)
    process.stdout.close()
    (job.folder / "go").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert len(job.log("worker-0")) == 999900


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


def test_escape_codes_of_a_task_are_not_shown(job):
    assert job.run(r"""print("a\x1b[31mred\x1b[0m \x1b[2K\x1b]0;title\x07x\x1b[?25l")""") == 0
    assert job.output() == "[worker:0] ared x\n"
    assert "\x1b[31m" in job.log("worker-0")


def test_repeated_warnings_are_shown_once_and_counted_and_prints_are_all_shown(job):
    code = """
import logging, warnings
warnings.simplefilter("always")
for _ in range(3):
    warnings.warn("slow")
    print('    warnings.warn("slow")?')
    logging.warning("odd")
    print("mine")
print("W0000 00:00:1795.6 1998 x.cc:5] late", file=sys.stderr)
print("E0000 00:00:1795.6 1998 x.cc:5] bad", file=sys.stderr)
"""
    assert job.run(code, "--workers=2") == 0
    lines = job.output().splitlines()
    bare = [line.split("] ", 1)[1] for line in lines if line.startswith("[worker:")]
    assert sum("UserWarning: slow" in line for line in bare) == 1
    assert bare.count('  warnings.warn("slow")') == 1 and bare.count('    warnings.warn("slow")?') == 6
    assert bare.count("WARNING:root:odd") == 1 and bare.count("mine") == 6
    assert sum("late" in line for line in bare) == 1 and sum("bad" in line for line in bare) == 2
    counts = [line for line in lines if "more line" in line]
    assert [line.split(" like: ")[0] for line in counts] == [
        f"tfdist: {x}" for x in ("5 more lines", "5 more lines", "1 more line")
    ]
    assert counts[1].endswith("] WARNING:root:odd")
    assert job.log("worker-1").count("WARNING:root:odd") == 3


def test_what_a_script_logs_is_shown(job):
    code = """
from absl import logging
logging.set_verbosity("info")
logging.info("mine")
logging.warning("mine, too")
"""
    assert job.run(code) == 0
    first, second = job.output().splitlines()
    assert first.endswith("mine") and second.endswith("mine, too")


def test_logs_of_the_run_before_are_put_away(job):
    assert job.run("print('first')", "--workers=2") == 0
    assert job.run("print('second')") == 0
    assert job.log("worker-0") == "second\n"
    assert (job.folder / "logs" / "before" / "worker-1.log").read_text() == "first\n"
    assert not (job.folder / "logs" / "worker-1.log").exists()


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
        launcher = Launcher([sys.executable, "-c", "print('on')"], local_cluster(1), folder, output=shown)
        monkeypatch.setattr("tfdist.launch.launcher.set_logs_aside", lambda *_: None)  # or the link would go
        assert launcher.run() == 0
    assert b"[worker:0] on\n" in shown.getvalue()
    assert f"cannot write {folder}/worker-0.log: {cause}".encode() in shown.getvalue()
