"""One folder, two runs: while the first lives the second is refused; whatever has ended hinders nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import time

import psutil
import pytest

from tfdist.errors import ConfigError
from tfdist.runtime.folders import claim
from tfdist.runtime.folders.claim import Claim
from tfdist.runtime.report import progress

ELSEWHERE = "process 1 on elsewhere (ab), begun at 1.0"


@pytest.fixture
def other(tmp_path):
    """A process that owns the folder."""
    with subprocess.Popen(["sleep", "600"]) as process:
        begun = psutil.Process(process.pid).create_time()
        text = f"process {process.pid} on {socket.gethostname()} (0f), begun at {begun:.2f}"
        (tmp_path / claim.FILE).write_text(text)
        yield process
        process.kill()


def test_a_folder_of_a_run_that_lives_is_refused_and_the_supervisor_is_told(other, tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "ENDING_SECONDS", 0.3)
    (tmp_path / "progress").mkdir()
    monkeypatch.setenv(progress.FOLDER, str(tmp_path / "progress"))
    with pytest.raises(ConfigError, match=f"which has not ended: process {other.pid} on"):
        Claim(str(tmp_path), "backup_dir").lock()
    assert progress.read(tmp_path / "progress", "worker-0").refused


@pytest.mark.parametrize("reaped", [True, False])
def test_a_run_that_was_killed_hinders_nobody_not_even_as_a_zombie(other, tmp_path, reaped):
    other.kill()
    if reaped:
        other.wait()
    with Claim(str(tmp_path), "backup_dir"):
        pass


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "ENDING_SECONDS", 60.0)
    with subprocess.Popen(["sleep", "1"]) as process:
        begun = psutil.Process(process.pid).create_time()
        text = f"process {process.pid} on {socket.gethostname()} (0f), begun at {begun:.2f}"
        (tmp_path / claim.FILE).write_text(text)
        with Claim(str(tmp_path), "backup_dir"):
            pass


def test_another_process_with_the_number_and_other_hosts_do_not_count(other, tmp_path):
    path, marker = tmp_path / claim.FILE, Claim(str(tmp_path), "backup_dir")
    for text in (
        f"process {other.pid} on {socket.gethostname()} (0f), begun at {time.time() - 9999:.2f}",
        f"process {other.pid} on elsewhere (0f), begun at {psutil.Process(other.pid).create_time():.2f}",
        f"process {os.getpid()} on {socket.gethostname()} (0f), begun at 1.0",
        f"process {'9' * 30} on {socket.gethostname()} (0f), begun at 1.0",
        "no text of ours",
    ):
        path.write_text(text)
        with marker:
            assert (marker.owner() == claim.this_run()) == ("elsewhere" not in text)
    with marker:
        marker.take()
        marker.check()
        marker.lock()
    assert not path.exists()


def test_of_two_runs_at_a_url_the_one_that_began_later_owns_it(monkeypatch):
    url = "memory://claims/run"
    first, second = Claim(url, "backup_dir"), Claim(url, "backup_dir")
    first.lock()
    first.take()
    first.check()
    with monkeypatch.context() as later:
        later.setattr(claim, "this_run", lambda: ELSEWHERE)
        second.lock()
        second.take()
    with pytest.raises(ConfigError, match="was taken over by a newer run: process 1 on elsewhere "):
        first.check()
    first.release()
    assert second.owner() == ELSEWHERE
    with monkeypatch.context() as later:
        later.setattr(claim, "this_run", lambda: ELSEWHERE)
        second.release()
    assert second.owner() is None
