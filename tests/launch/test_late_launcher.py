"""A launcher that the system has stopped for seconds at a bad moment loses no line of its tasks."""

import io
import os
import selectors
import sys
import threading
import time
import types

import pytest

from tfdist.cluster import TaskSpec, local_cluster
from tfdist.launch import launcher, output, process


@pytest.fixture
def looked(monkeypatch):
    """Has the launcher stand still for seconds after it has looked at the clock once; returns an event of its second look."""
    looks, event = [], threading.Event()

    def monotonic():
        looks.append(time.monotonic())
        if len(looks) > 1:
            event.set()
        return looks[-1] + 5.0 * (len(looks) > 1)

    for module in (launcher, output):
        clock = types.SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
        monkeypatch.setattr(module, "time", clock)
    return event


def test_it_reads_the_last_words_of_a_task(tmp_path, looked):
    shown = io.BytesIO()
    late = launcher.Launcher([], local_cluster(1), tmp_path, output=shown)
    command = [sys.executable, "-S", "-c", "print('x' * 60000); raise ValueError('the cause')"]
    task = process.TaskProcess(TaskSpec("worker", 0), command, os.environ, tmp_path / "worker-0.log", append=False)
    try:
        task.process.wait(60)
        with selectors.DefaultSelector() as late._selector:
            late._drain(task)
        assert process.last_error_line(task.held) == "ValueError: the cause"
        assert not task.open
    finally:
        task.close()


def test_it_writes_the_last_lines(tmp_path, looked):
    class Reader(io.BytesIO):
        """Takes nothing before the launcher has looked twice."""

        def write(self, chunk):
            assert looked.wait(60)
            return super().write(chunk)

    shown = Reader()
    late = output.LauncherOutput(shown, tmp_path)
    late.say("the cause")
    late.say("the end")
    late.close(lambda: 0)
    assert shown.getvalue() == b"tfdist: the cause\ntfdist: the end\n"
