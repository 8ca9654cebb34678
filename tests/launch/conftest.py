"""A launcher for each test, of which nothing is left after it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from tests.helpers.launched_job import Job


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for pid in job.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if job.process:
        job.process.wait(timeout=30)
