"""`uploads` and `Workdir`: local folders whose files are uploaded; on a server of S3 that fails for a while."""

import threading

import pytest

from tests.helpers import s3 as s3_helper
from tests.helpers.launched_job import until
from tfdist.errors import ConfigError
from tfdist.runtime.folders import claim, storage, uploads
from tfdist.runtime.folders.uploads import UploadedFolder
from tfdist.runtime.folders.workdir import Workdir

s3 = s3_helper.s3


def everything(path):
    return True


def test_files_are_uploaded_removed_and_downloaded_again(s3):
    url = f"{s3.url}/logs"
    first = UploadedFolder(url, everything)
    (first.folder / "run").mkdir()
    (first.folder / "run" / "events").write_bytes(b"1")
    (first.folder / "run" / "old").write_bytes(b"2")
    first.finish()
    assert s3.files() == ["logs/run/events", "logs/run/old"]
    (first.folder / "run" / "events").write_bytes(b"12")
    (first.folder / "run" / "old").rename(first.folder / "run" / "new")
    first.finish()
    assert s3.files() == ["logs/run/events", "logs/run/new"]
    assert storage.read(f"{url}/run/events") == b"12"
    second = UploadedFolder(url, lambda path: path != "run/new")
    assert [path.name for path in (second.folder / "run").iterdir()] == ["events"]
    before = len(s3.requests)
    second.finish()
    assert s3.files() == ["logs/run/events", "logs/run/new"]
    assert not [path for method, path in s3.requests[before:] if method == "PUT"], "nothing has changed"


@pytest.mark.parametrize(("status", "why"), [(500, "InternalError"), (403, "no permission")])
def test_a_failing_upload_costs_one_warning_and_is_tried_again(s3, capsys, monkeypatch, status, why):
    monkeypatch.setattr(uploads, "PAUSES_AT_END", (0.0,))
    opened = UploadedFolder(f"{s3.url}/logs", everything)
    (opened.folder / "events").write_bytes(b"1")
    s3.rule = lambda method, path, body: status if method == "PUT" else None
    opened.finish()
    opened.finish()
    said = capsys.readouterr().out
    assert said.count("logs are not uploaded now: ") == 1 and why in said
    assert f"not uploaded to {s3.url}/logs: events. The last error: " in said
    assert s3_helper.SECRET not in said
    s3.rule = None
    opened.finish()
    assert "logs are uploaded to" in capsys.readouterr().out and s3.files() == ["logs/events"]


def test_an_upload_that_takes_long_does_not_stop_the_training(s3):
    opened = UploadedFolder(f"{s3.url}/logs", everything)
    (opened.folder / "events").write_bytes(b"1")
    asked, answers = threading.Event(), threading.Event()

    def wait(method, path, body):
        asked.set()
        answers.wait(60)

    s3.rule = wait
    opened.upload()
    assert asked.wait(60)
    (opened.folder / "more").write_bytes(b"1")
    opened.upload()
    assert not s3.files()
    answers.set()
    opened.finish()
    assert s3.files() == ["logs/events", "logs/more"]


def test_a_work_directory_at_a_url_belongs_to_the_newest_run(s3, capsys, monkeypatch):
    monkeypatch.setattr(uploads, "PAUSES_AT_END", (0.0,))
    workdir = Workdir(f"{s3.url}/run/")
    with workdir.claim(is_owner=True):
        assert storage.read(f"{workdir}/run").decode() == claim.this_run()
        storage.write(f"{workdir}/run", b"process 1 on another (x), begun at 1.0")
        (workdir.logs / "log.csv").write_bytes(b"1")
        with pytest.raises(ConfigError, match="was taken over by a newer run"):
            workdir.check_owner()
    assert f"workdir '{workdir}' was taken over by a newer run: process 1 on another" in capsys.readouterr().out
    assert s3.files() == ["run/run"]


def test_a_work_directory_that_cannot_be_read_ends_the_start(s3):
    told = r"workdir must be a folder .*: s3://nobucket/x/run cannot be written: .*bucket does not exist"
    with pytest.raises(ConfigError, match=told), Workdir("s3://nobucket/x").claim(is_owner=True):
        pass


def test_tasks_write_to_their_launchers_folder_and_the_chief_uploads_it(s3, monkeypatch):
    launcher, chief, worker = (Workdir(f"{s3.url}/run") for _ in range(3))
    with launcher.claim(is_owner=True):
        (launcher.logs / "old.csv").write_bytes(b"1")
        for name, value in {**launcher.for_tasks(), claim.JOB: claim.this_run()}.items():
            monkeypatch.setenv(name, value)
        with worker.claim(is_owner=False), chief.claim(is_owner=True):
            assert worker.logs == chief.logs == launcher.logs
            (worker.logs / "log.csv").write_bytes(b"1")
            worker.upload()
            assert s3.files() == ["run/run"]
            chief.upload()
            until(lambda: s3.files() == ["run/log.csv", "run/old.csv", "run/run"])
            (worker.logs / "log.csv").unlink()
            until(lambda: chief.upload() or s3.files() == ["run/old.csv", "run/run"])
            (worker.logs / "last.csv").write_bytes(b"1")
    assert s3.files() == ["run/last.csv", "run/old.csv"]
