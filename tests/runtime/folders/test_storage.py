"""The functions for local paths do the same at URLs; their errors name the cause, and no secret."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from tests.helpers.s3 import s3  # noqa: F401 (a fixture)
from tfdist.config import BackupConfig, validation
from tfdist.runtime.folders import storage


@pytest.fixture(params=["local", "file", "memory", "s3"])
def folder(request, tmp_path):
    bases = {"local": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{uuid.uuid4().hex}"}
    if request.param == "s3":
        return f"{request.getfixturevalue('s3').url}/base"
    return bases[request.param]


def test_files_and_folders(folder, tmp_path):
    made = f"{folder}/made"
    storage.make_folder(f"{made}/sub")
    storage.write(f"{made}/sub/one", b"12")
    storage.write(f"{made}/sub/one", b"123")
    assert (storage.read(f"{made}/sub/one"), storage.size(f"{made}/sub/one")) == (b"123", 3)
    assert storage.modified(f"{made}/sub/one") > 1.7e18
    assert (storage.list_folder(made), storage.list_folder(f"{made}/sub")) == (["sub"], ["one"])
    kinds = [storage.is_folder(f"{made}/sub"), storage.is_folder(f"{made}/sub/one"), storage.is_file(f"{made}/sub/one")]
    assert kinds == [True, False, True]
    assert storage.exists(made) and not storage.exists(f"{made}/other")
    (tmp_path / "from").write_bytes(b"x" * 100_000)
    storage.write(f"{made}/sub/two", b"")
    if storage.is_url(made):
        storage.upload(str(tmp_path / "from"), f"{made}/sub/two")
        storage.download(f"{made}/sub/two", str(tmp_path / "to"))
        assert (tmp_path / "to").read_bytes() == b"x" * 100_000
    storage.rename(f"{made}/sub", f"{made}/new")
    storage.rename(f"{made}/new/one", f"{made}/new/two")
    assert (storage.list_folder(made), storage.list_folder(f"{made}/new")) == (["new"], ["two"])
    assert storage.read(f"{made}/new/two") == b"123"
    for missing in (storage.read, storage.list_folder, storage.size, storage.remove_tree):
        with pytest.raises(FileNotFoundError):
            missing(f"{made}/other")
    with pytest.raises(NotADirectoryError):
        storage.list_folder(f"{made}/new/two")
    storage.remove(f"{made}/new/two")
    storage.remove(f"{made}/new/two")
    storage.write(f"{folder}/left", b"")
    if storage.exists(made):  # a folder of a file system
        storage.remove_tree(made)
    assert storage.list_folder(folder).count("left") == 1 and not storage.exists(made)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("foo://x/y", "backup.dir 'foo://x/y' has the unknown scheme 'foo'. Known are s3://"),
        ("az://x/y", "backup.dir 'az://x/y' needs a package that is not installed: "),
        ("s3://", "backup.dir must name a bucket or a folder, such as s3://bucket/folder"),
        ("simplecache::s3://x", "backup.dir must be a path or one URL, such as s3://bucket/folder"),
        ("s3://key:se/cret@bucket", "backup.dir must not contain credentials or parameters, because it appears in logs. Received: 's3://...@bucket'"),
        ("s3://bucket/x?token=secret", "backup.dir must not contain credentials or parameters"),
        ("s3://bucket/x", ""),
        ("memory://x", ""),
    ],
)  # fmt: skip
def test_a_url_that_cannot_work_is_found_without_a_connection(url, fault):
    found = " ".join(validation.group_faults(BackupConfig(dir=url), "backup"))
    assert found.startswith(fault) and bool(found) == bool(fault), found
    assert "cret" not in found


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [(500, storage.PassingError, "InternalError of the test"), (403, storage.DeniedError, "no permission (")],
)
def test_errors_of_a_server(s3, status, error, text):  # noqa: F811
    s3.rule = lambda method, path, body: status
    with pytest.raises(error) as caught:
        storage.write(f"{s3.url}/x", b"")
    assert f"{s3.url}/x cannot be written: {text}" in str(caught.value)


def test_a_bucket_that_does_not_exist_is_no_empty_folder(s3):  # noqa: F811
    with pytest.raises(storage.StorageError, match=r"s3://nobody/x cannot be written: The specified bucket does not"):
        storage.write("s3://nobody/x", b"")
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        storage.list_folder("s3://nobody/x")


def test_without_credentials_the_message_says_so(s3, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(storage.DeniedError, match=r"no credentials .*AWS_ACCESS_KEY_ID"):
        storage.read(f"{s3.url}/x")


@pytest.mark.parametrize(
    ("options", "variable", "used"),
    [({}, "", 1), ({"config_kwargs": {"retries": {"max_attempts": 7}}}, "", 7), ({}, "AWS_MAX_ATTEMPTS", None)],
)
def test_a_call_is_tried_twice_unless_the_environment_says_otherwise(s3, monkeypatch, options, variable, used):  # noqa: F811
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    if variable:
        monkeypatch.setenv(variable, "3")
    with storage.access(s3.url, "be read") as (fs, _):
        assert fs.config_kwargs.get("retries", {}).get("max_attempts") == used
    if used == 1:
        s3.rule = lambda method, path, body: 500
        with pytest.raises(storage.PassingError):
            storage.write(f"{s3.url}/x", b"")
        assert len(s3.requests) == 2
