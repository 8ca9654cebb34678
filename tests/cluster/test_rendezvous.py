"""Ranks find each other in a folder whatever an earlier start, or another user, has left there: real processes and files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launched_job import until
from tfdist.cluster.resolvers import rendezvous
from tfdist.errors import ClusterError

EXCHANGE = """
import sys
from tfdist.cluster.resolvers import rendezvous
from tfdist.errors import ClusterError
folder, rank, size, address, timeout = sys.argv[1:]
try:
    print(*rendezvous.exchange(folder, "slurm.pmix/7@1", int(rank), int(size), address, float(timeout)))
except ClusterError as e:
    sys.exit(str(e))
"""


@contextlib.contextmanager
def ranks(folder):
    """Yields a function that starts a rank; ends those that are left."""
    started = []

    def start(rank, size, address, timeout=60.0):
        command = [sys.executable, "-c", EXCHANGE, *map(str, (folder, rank, size, address, timeout))]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def printed(process):
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return out.split()


def test_addresses_of_an_earlier_start_are_not_taken(tmp_path):
    """Its ranks were killed when they had written theirs, one of them even the list; the job has the same name."""
    place = tmp_path / "tfdist-slurm.pmix_7@1-3"
    with ranks(tmp_path) as start:
        old = [start(rank, 3, f"old:{rank}") for rank in (0, 1)]
        until(lambda: (place / "0").exists() and (place / "1").exists())
        for process in old:
            process.send_signal(signal.SIGKILL)
            process.wait()
        (place / "2").write_text('{"address": "old:2", "token": "t"}')
        new = [start(0, 3, "new:0")]
        until(lambda: (place / "list").exists() and "old:2" in (place / "list").read_text())
        new += [start(2, 3, "new:2")]
        time.sleep(0.5)
        assert [process.poll() for process in new] == [None, None], "they wait for rank 1"
        new += [start(1, 3, "new:1")]
        assert [printed(process) for process in new] == [["new:0", "new:1", "new:2"]] * 3
    assert not list(tmp_path.iterdir()), "nothing is left for the next start"


def test_what_an_agreed_start_has_left_is_not_taken(tmp_path):
    """Rank 1 of it was killed before it could read the list, which therefore stays."""
    place = tmp_path / "tfdist-slurm.pmix_7@1-2"
    place.mkdir()
    (place / "1").write_text('{"address": "old:1", "token": "t", "confirms": "n"}')
    (place / "list").write_text('{"number": "n", "members": [["old:0", "s"], ["old:1", "t"]], "agreed": true}')
    with ranks(tmp_path) as start:
        first = start(1, 2, "new:1")
        until(lambda: "new:1" in (place / "1").read_text())
        assert [printed(each) for each in (start(0, 2, "new:0"), first)] == [["new:0", "new:1"]] * 2


def test_a_rank_that_does_not_come_leaves_its_old_file_unconfirmed(tmp_path):
    place = tmp_path / "tfdist-job-2"
    place.mkdir()
    (place / "1").write_text('{"address": "old:1", "token": "t", "confirms": "n"}')
    with pytest.raises(ClusterError, match=r"Waited 0 s for rank 1 to confirm .*\(an earlier start may have left"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 0.3)
    assert sorted(path.name for path in place.iterdir()) == ["1"], "of this rank nothing is left"


def test_a_rank_may_ask_again(tmp_path):
    with ranks(tmp_path) as start:
        other = start(1, 2, "b:1")
        asked = (str(tmp_path), "slurm.pmix/7@1", 0, 2, "a:1", 60.0)
        assert rendezvous.exchange(*asked) == rendezvous.exchange(*asked) == printed(other)


def test_links_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = tmp_path / "folder" / "tfdist-job-2"
    place.mkdir(parents=True)
    (place / "0").symlink_to(precious)
    (place / "1").symlink_to(precious)
    with pytest.raises(ClusterError, match=r"rank 1 cannot be read from .*: expected a regular file, and found a link"):
        rendezvous.exchange(str(place.parent), "job", 0, 2, "a:1", 60.0)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "tfdist-job-2").symlink_to(place)
    with pytest.raises(ClusterError, match=r"rank 0 cannot write its address to .*: it is a link"):
        rendezvous.exchange(str(tmp_path / "links"), "job", 0, 2, "a:1", 60.0)
    assert precious.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_another_user_has_put_there_is_not_trusted(tmp_path):
    place = tmp_path / "tfdist-job-2"
    place.mkdir()
    (place / "1").write_text('{"address": "evil:1", "token": "t"}')
    os.chown(place / "1", 12345, 12345)
    with pytest.raises(ClusterError, match=r"rank 1 cannot be read from .*: it belongs to another user"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 60.0)
    os.chown(place, 12345, 12345)
    with pytest.raises(ClusterError, match="the folder belongs to another user"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 60.0)


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"null", b'{"address": 1, "token": "t"}', b"[" * 100_000],
    ids=["no text", "no entry", "no address", "deep"],
)
def test_what_holds_no_address_is_told(tmp_path, text):
    (tmp_path / "tfdist-job-2").mkdir()
    (tmp_path / "tfdist-job-2" / "1").write_bytes(text)
    with pytest.raises(
        ClusterError, match=r"rank 1 cannot be read from .*its content is not a valid address file.*Remove that folder"
    ):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 60.0)


def test_what_was_left_a_week_ago_is_removed_and_nothing_else(tmp_path):
    folders = [tmp_path / name for name in ("tfdist-old-2", "tfdist-new-2", "tfdist-else", "mine")]
    for folder in folders:
        folder.mkdir()
        (folder / "1").write_text("x")
    (folders[2] / "notes").write_text("x")
    for folder in (folders[0], *folders[2:]):
        os.utime(folder, (time.time() - 8 * 86400,) * 2)
    with pytest.raises(ClusterError, match="Waited 0 s"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 0.1)
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    assert pathlib.Path(folders[2] / "1").exists()
