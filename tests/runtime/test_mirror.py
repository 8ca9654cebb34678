"""`mirror`: local folders whose files a thread uploads; on a server of S3 that fails for a while."""

import os
import subprocess
import sys
import threading

import pytest

from tests.helpers import s3 as s3_helper
from tests.helpers.launched_job import until
from tfdist.errors import ConfigError
from tfdist.runtime import mirror, ownership, storage

s3 = s3_helper.s3


@pytest.fixture
def url(s3):
    yield f"{s3.url}/logs"
    mirror.close(f"{s3.url}/logs")


def everything(path):
    return True


def test_files_are_uploaded_removed_and_downloaded_again(s3, url):
    first = mirror.opened(url, "log_dir", everything)
    (first.folder / "run").mkdir()
    (first.folder / "run" / "events").write_bytes(b"1")
    (first.folder / "run" / "old").write_bytes(b"2")
    mirror.settle()
    assert s3.files() == ["logs/run/events", "logs/run/old"]
    (first.folder / "run" / "events").write_bytes(b"12")
    (first.folder / "run" / "old").rename(first.folder / "run" / "new")
    (first.folder / "run" / "x.partial").write_bytes(b"3")
    mirror.settle()
    assert s3.files() == ["logs/run/events", "logs/run/new"]
    assert storage.read(f"{url}/run/events") == b"12"
    folder = first.folder
    mirror.close(url)
    assert not folder.exists()
    second = mirror.opened(url, "log_dir", lambda path: path != "run/new")
    assert [path.name for path in (second.folder / "run").iterdir()] == ["events"]
    mirror.settle()
    assert s3.files() == ["logs/run/events", "logs/run/new"]


@pytest.mark.parametrize(("status", "why"), [(500, "InternalError"), (403, "no permission")])
def test_a_failing_upload_costs_one_warning_and_is_tried_again(s3, url, capsys, monkeypatch, status, why):
    monkeypatch.setattr(mirror, "_PAUSES_AT_END", ())
    opened = mirror.opened(url, "log_dir", everything)
    (opened.folder / "events").write_bytes(b"1")
    s3.rule = lambda method, path, body: status if method == "PUT" else None
    mirror.settle()
    mirror.settle()
    said = capsys.readouterr().out
    assert said.count("logs are not uploaded now: ") == 1 and why in said
    assert s3_helper.SECRET not in said
    s3.rule = None
    mirror.settle()
    assert "logs are uploaded to" in capsys.readouterr().out and s3.files() == ["logs/events"]
    (opened.folder / "last").write_bytes(b"1")
    s3.rule = lambda method, path, body: status
    mirror.close(url)
    assert f"not uploaded to {url}: last. The last error: " in capsys.readouterr().out


def test_a_newer_run_owns_the_folder(s3, url, capsys):
    opened = mirror.opened(url, "workdir", everything, owns=True)
    assert storage.read(f"{url}/run").decode() == ownership.this_run()
    storage.write(f"{url}/run", b"process 1 on another (x), begun at 1.0")
    (opened.folder / "events").write_bytes(b"1")
    mirror.settle()
    assert f"workdir '{url}' was taken over by a newer run: process 1 on another" in capsys.readouterr().out
    assert s3.files() == ["logs/run"]
    with pytest.raises(ConfigError, match="was taken over by a newer run"):
        mirror.check_owner(url, "workdir")


def test_a_folder_that_cannot_be_read_ends_the_start(s3):
    with pytest.raises(
        ConfigError,
        match=r"workdir must be a folder .*: s3://nobucket/x/run cannot be written: .*bucket does not exist",
    ):
        mirror.opened("s3://nobucket/x", "workdir", everything, owns=True)


def test_a_forked_process_leaves_the_folder(s3, url):
    opened = mirror.opened(url, "log_dir", everything)
    child = os.fork()
    if child == 0:
        mirror._close_all()
        os._exit(0)
    os.waitpid(child, 0)
    until(opened.folder.exists)


def test_a_server_that_never_answers_ends_with_a_warning_and_keeps_the_files(s3, url, capsys, monkeypatch):
    monkeypatch.setattr(mirror, "_PATIENCE", 0.2)
    monkeypatch.setattr(mirror, "_PAUSES_AT_END", ())
    opened = mirror.opened(url, "log_dir", everything)
    (opened.folder / "events").write_bytes(b"1")
    mirror.settle()
    answers = threading.Event()
    s3.rule = lambda method, path, body: answers.wait(60) and None
    (opened.folder / "more").write_bytes(b"1")
    mirror.close(url)
    assert f"not uploaded to {url}: more. The last error: no answer within 0.2 s" in capsys.readouterr().out
    answers.set()
    opened._thread.join(60)
    assert "logs/events" in s3.files()


@pytest.mark.parametrize("how", ["process_end.end(3)", "sys.exit(3)"])
def test_the_last_lines_are_uploaded_however_a_process_ends(s3, url, how):
    program = f"""
import sys
from tfdist.runtime import mirror, process_end
opened = mirror.opened({url!r}, "log_dir", lambda path: True)
(opened.folder / "events").write_bytes(b"last")
{how}
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 3
    assert storage.read(f"{url}/events") == b"last"
