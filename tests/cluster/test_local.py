"""A cluster on this machine, on ports that are free."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tfdist import cluster
from tfdist.cluster import local
from tfdist.errors import ConfigError
from tfdist.runtime.folders import temporary


def test_ports_are_free_and_different():
    ports = cluster.free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as s:
            s.bind(("", port))


def unused_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def test_a_port_that_another_process_was_given_is_not_given_again():
    (given,), free = cluster.free_ports(1), unused_port()
    code = f"local.random.SystemRandom.sample = lambda *_: [{given}, {free}]; print(local.free_ports(1))"
    done = subprocess.run(
        [sys.executable, "-c", f"from tfdist.cluster import local; {code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"[{free}]\n"


def of_another_user(folder):
    if os.geteuid():
        pytest.skip("only root gives a folder away")
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)


def link(folder):
    (folder.parent / "elsewhere").mkdir(0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    "squat", [of_another_user, link, lambda folder: folder.mkdir() or folder.chmod(0o777), pathlib.Path.touch]
)
def test_a_strangers_folder_in_place_of_the_users_is_not_used(tmp_path, monkeypatch, squat):
    monkeypatch.setattr(temporary, "OF_ALL_PROCESSES", str(tmp_path))
    folder = tmp_path / f".tfdist-{os.geteuid()}"
    squat(folder)
    assert temporary.user_folder() is None
    assert len(set(cluster.free_ports(3))) == 3
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as s:
        s.bind(("", 0))
        taken, free = s.getsockname()[1], unused_port()
        monkeypatch.setattr(local.random.SystemRandom, "sample", lambda *_: [taken, free])
        with pytest.raises(ConfigError, match=r"No 2 free ports .* 1 were found"):
            cluster.free_ports(2)
        assert cluster.free_ports(1) == [free]


def test_a_local_cluster_has_a_chief_on_top_with_parameter_servers_only():
    sizes = [{job: len(a) for job, a in cluster.local_cluster(2, ps).jobs.items()} for ps in (0, 1)]
    assert sizes == [{"worker": 2}, {"chief": 1, "worker": 2, "ps": 1}]
    with pytest.raises(ConfigError, match="workers=0, ps=-1"):
        cluster.local_cluster(0, -1)
