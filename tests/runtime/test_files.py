"""Files that a user names: none of them makes the program wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tfdist.cluster.resolvers import hosts, rendezvous
from tfdist.errors import ClusterError, ConfigError
from tfdist.runtime.files import read_file


def test_a_named_pipe_is_refused_in_a_sentence_wherever_a_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "tfdist-job-2").mkdir()
    os.mkfifo(tmp_path / "tfdist-job-2" / "1")
    with pytest.raises(ConfigError, match=r"hostfile .*expected a regular file, and found a FIFO"):
        hosts.cluster(hostfile=str(tmp_path / "pipe.py"))
    with pytest.raises(ClusterError, match=r"address of rank 1 cannot be read from .*expected a regular file"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 60.0)
    command = [sys.executable, "-m", "tfdist.train", f"--config={tmp_path}/pipe.py", f"--workdir={tmp_path}/run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"tfdist: --config={tmp_path}/pipe.py: expected a regular file, and found a FIFO.\n"


def test_an_address_that_is_no_text_is_told_and_an_empty_one_is_waited_for(tmp_path):
    (tmp_path / "tfdist-job-2").mkdir()
    (tmp_path / "tfdist-job-2" / "1").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="address of rank 1 cannot be read from"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 60.0)
    (tmp_path / "tfdist-job-2" / "1").write_bytes(b"")
    with pytest.raises(ClusterError, match="Waited 0 s for the addresses of rank 1"):
        rendezvous.exchange(str(tmp_path), "job", 0, 2, "a:1", 0.2)


def test_a_file_and_what_a_shell_passes_as_one_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    assert read_file(tmp_path / "file") == b"text"
    reads, writes = os.pipe()
    os.write(writes, b"piped")
    os.close(writes)
    assert read_file(f"/dev/fd/{reads}") == b"piped"
    os.close(reads)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
