"""`tfdist launch`: its command line, and a hangup under nohup."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Usage: "),
        (["--workers=0", "--", "true"], "--workers"),
        (["--workers=two", "--", "true"], "flag --workers=two: expected a whole number. Received: 'two'"),
        (["--wrokers=2", "--", "true"], "unknown flag '--wrokers'; did you mean '--workers'? Known: "),
        (["x", "--", "true"], "Usage: "),
        (
            ["--workers", "2", "python", "script.py", "--epochs=1"],
            "--workers. Write the command behind --: tfdist launch",
        ),
    ],
)
def test_a_faulty_command_line_is_told_in_sentences(flags, told, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *flags], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_hangup_is_ignored_under_nohup(tmp_path):
    command = ["nohup", sys.executable, "-m", "tfdist.launch", "--", "sh", "-c", "echo started; sleep 4"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == "[worker:0] started\n"
    process.send_signal(signal.SIGHUP)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
