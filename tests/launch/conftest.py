"""A launcher for each test, of which nothing is left after it."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.launched_job import PRELUDE, Job
from tfdist.cluster import ClusterSpec
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for pid in job.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if job.process:
        job.process.wait(timeout=30)


@pytest.fixture
def supervise(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs a Python script as the tasks of a cluster, supervised by this process; returns the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, cluster: ClusterSpec, **options: object) -> tuple[int, str]:
        (tmp_path / "script.py").write_text(PRELUDE + script)
        output = io.BytesIO()
        launcher = Launcher(Options([sys.executable, "script.py"], cluster, "logs", **options), output=output)
        return launcher.run(), output.getvalue().decode()

    return run
