"""What a launcher and its tasks keep in the temporary folder goes with them, however they end; and that folder may be full."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.helpers import full_disk
from tests.helpers.launched_job import PROGRESS, imported, until

OWN = (
    imported("tfdist.runtime.folders.temporary")
    + """
def make():
    with temporary.temporary_folder() as folder:
        pathlib.Path(folder, "model.keras").write_bytes(b"x" * 5000)
        print(folder, flush=True)
        while True:
            time.sleep(0.05)
"""
)


@pytest.fixture(autouse=True)
def tmpdir(tmp_path, monkeypatch):
    """Temporary files of the test's processes go here."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


def files(folder):
    # os.walk passes over a folder that is removed meanwhile.
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, folders, names in os.walk(folder)
        for name in folders + names
    )


def test_a_launcher_that_is_killed_leaves_nothing(job, tmpdir):
    job.start(OWN + "make()", "--workers=2")
    until(lambda: job.output().count("/files/tfdist-") == 2)  # one of each task
    assert any("model.keras" in name for name in files(tmpdir))
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    until(lambda: not files(tmpdir) and not job.alive())


def test_what_a_killed_task_has_left_goes_at_the_restart(job, tmpdir):
    code = f"""{PROGRESS}
if progress.restarts() == 0:
    if TASK["index"] == 1:
        import threading; threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    make()
print("left:", [str(path) for path in pathlib.Path(os.environ["TMPDIR"]).rglob("*.keras")], flush=True)
"""
    assert job.run(OWN + code, "--workers=2", "--max_restarts=1") == 0
    assert job.output().count("left: []") == 2 and "restart 1/1" in job.output()
    assert not files(tmpdir)


def test_without_a_launcher_the_next_start_removes_what_dead_processes_have_left(tmpdir):
    """And what a live one has, or another user, stays."""

    def start():
        code = "import pathlib, time\n" + OWN + "make()"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        folder = pathlib.Path(process.stdout.readline().strip())
        assert folder.parent == tmpdir, "the test changes its owner"
        return process, folder

    started = [start() for _ in range(3)]
    try:
        (dead, dead_folder), (_, live_folder), (other, others_folder) = started
        for process in (dead, other):
            process.kill()
            process.wait()
        if os.geteuid() == 0:
            os.chown(others_folder, 12345, 12345)
        started.append(start())
        assert not dead_folder.exists()
        assert (live_folder / "model.keras").exists() and started[-1][1].exists()
        assert others_folder.exists() == (os.geteuid() == 0)
    finally:
        for process, _ in started:
            process.kill()
            process.communicate()


def test_a_full_temporary_folder_costs_one_warning_for_each_task(job, tmpdir):
    code = f"""{PROGRESS}
for step in range(5):
    progress.write(done=step + 1)
print("trained", flush=True)
"""
    with full_disk.mounted(tmpdir, 4096):
        assert job.run(code, "--workers=2") == 0
        assert not files(tmpdir)
    assert job.output().count("trained") == 2
    assert job.output().count("the training continues, but its supervisor may not know its step") == 2
    assert f"cannot write {tmpdir}/tfdist-" in job.output()


def test_a_folder_that_is_full_at_a_restart_or_from_the_start_ends_nothing(job, tmpdir):
    """And the number of restarts is right."""
    code = f"""{PROGRESS}
print("restart", progress.restarts(), flush=True)
if progress.restarts() == 0:
    filler = pathlib.Path(os.environ["TMPDIR"], "filler").open("wb", buffering=0)
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError:
        sys.exit(1)
"""
    with full_disk.mounted(tmpdir, 1 << 16):
        assert job.run(code, "--workers=1", "--max_restarts=1") == 0
        assert files(tmpdir) == ["filler"]
        assert "restart 1" in job.output()
        assert job.run("print('trained')", "--workers=1") == 0
        assert files(tmpdir) == ["filler"]
    assert job.output() == "[worker:0] trained\n", "its files are in the next of the system's temporary folders"


def test_a_full_disk_of_logs_costs_one_warning(job):
    logs = job.folder / "logs"
    logs.mkdir()
    code = "print('x' * 5000, flush=True)\nprint('trained', flush=True)"
    with full_disk.mounted(logs, 4096):
        assert job.run(code, "--workers=1") == 0
    assert "trained" in job.output()
    assert job.output().count("cannot write logs/worker-0.log: No space left on device") == 1


def test_earlier_logs_that_cannot_be_put_away_are_kept(job):
    (job.folder / "logs").mkdir()
    (job.folder / "logs" / "worker-0.log").write_text("earlier\n")
    (job.folder / "logs" / "before").write_text("in the way")
    assert job.run("print('later')", "--workers=1") == 0
    assert job.log("worker-0") == "earlier\nlater\n"
    assert job.output().count("cannot write in logs: ") == 1
