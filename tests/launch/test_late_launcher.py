"""A launcher that the system has stopped for seconds at a bad moment loses no line of its tasks."""

import io
import os
import sys
import threading
import time
import types

import pytest

from tfdist.cluster import TaskSpec
from tfdist.launch import output, process


@pytest.fixture
def late(monkeypatch):
    """Has the launcher stand still for seconds after it has looked at the clock once."""
    looks = []

    def monotonic():
        looks.append(time.monotonic())
        return looks[-1] + 5.0 * (len(looks) > 1)

    monkeypatch.setattr(output, "time", types.SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep))


def test_it_reads_the_last_words_of_a_task(tmp_path, late):
    shown = io.BytesIO()
    shown_lines = output.LauncherOutput(shown, tmp_path)
    command = [sys.executable, "-S", "-c", "print('x' * 60000); raise ValueError('the cause')"]
    task = process.TaskProcess(TaskSpec("worker", 0), command, os.environ, tmp_path / "worker-0.log")
    try:
        task.process.wait(60)
        shown_lines.drain(task)
        assert task.failure().last_line == "ValueError: the cause"
    finally:
        task.close()


def test_it_writes_the_last_lines(tmp_path, monkeypatch):
    stopped = threading.Event()

    class Reader(io.BytesIO):
        """Takes nothing before the launcher runs again."""

        def write(self, chunk):
            assert stopped.wait(60)
            return super().write(chunk)

    shown = Reader()
    ends = output.LauncherOutput(shown, tmp_path)
    wait = output.BackgroundWriter.wait

    def stop_and_wait(self, seconds):
        if not stopped.is_set():
            time.sleep(2.5)  # the system lets neither the launcher nor its reader run
            stopped.set()
        wait(self, seconds)

    monkeypatch.setattr(output.BackgroundWriter, "wait", stop_and_wait)
    ends.say("the cause")
    ends.say("the end")
    ends.close(lambda: 0)
    assert shown.getvalue() == b"tfdist: the cause\ntfdist: the end\n"
