"""Tasks that start in any order, behind proxies, before their names are known, or not at all: a run, or a sentence."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.helpers import fork_server
from tests.helpers import two_hosts as two_hosts_lib
from tests.helpers.launched_job import until
from tfdist.cluster import ClusterSpec, TaskSpec, free_ports, local_cluster

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)

CONFIG = ["--config=configs/digits_multi_worker.py", "--config.epochs=1", "--config.steps_per_epoch=4"]


class Tasks:
    """The tasks of a training, each started by itself; a context manager that ends them all."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            fork_server.kill(process)

    def start(self, cluster, index, *options, before=(), **environ):
        """Starts a task, given as itself or as a worker's index, with TF_CONFIG where there is a cluster."""
        task = index if isinstance(index, TaskSpec) else TaskSpec("worker", index)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        for name in ("TF_CONFIG", "no_proxy", "NO_PROXY", "no_grpc_proxy"):
            environ.pop(name, None)
        if cluster:
            environ["TF_CONFIG"] = cluster.to_tf_config(task)
        words = [*CONFIG, f"--workdir={self.folder / 'run'}", *options]
        # A program of the fork server has the server's mounts.
        command = [*before, sys.executable, "-m"] if before else fork_server.command("")[:-1]
        command += ["tfdist.train", *words]
        with (self.folder / f"log{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def log(self, number=0):
        return (self.folder / f"log{number}").read_text()

    def finish(self, seconds=200):
        """Waits for all, which must have trained."""
        for number, process in enumerate(self.processes):
            assert process.wait(seconds) == 0, self.log(number)
        assert json.loads((self.folder / "run" / "summary.json").read_text())["steps"] == 4


@pytest.fixture
def tasks(tmp_path):
    with Tasks(tmp_path) as found:
        yield found


def test_roles_that_wait_for_each_other_in_vain_say_so(tasks):
    """A chief whose worker does not come, and in another cluster those whose chief does not; one whose port is taken."""
    options = ["--config.strategy.name=parameter_server", "--config.start_timeout=3"]
    first, second = local_cluster(1, ps=1), local_cluster(1, ps=1)
    (taken,) = (int(address.rpartition(":")[2]) for address in local_cluster(1).jobs["worker"])
    third = ClusterSpec({**second.jobs, "ps": [f"127.0.0.1:{taken}"]})
    with socket.create_server(("", taken)):
        tasks.start(first, first.chief, *options)
        tasks.start(second, TaskSpec("worker", 0), *options)
        tasks.start(third, TaskSpec("ps", 0), *options)
        assert [process.wait(150) for process in tasks.processes] == [1] * 3
    assert f"Waited 3 s for worker:0 at {first.jobs['worker'][0]} (connection refused), ps:0 at" in tasks.log(0)
    assert f"Waited 3 s for chief:0 at {second.jobs['chief'][0]} (connection refused)" in tasks.log(1)
    assert f"ps:0 cannot listen at 127.0.0.1:{taken}: port {taken} is taken by pid {os.getpid()}" in tasks.log(2)
    assert not [number for number in range(3) if "Traceback" in tasks.log(number)]


def test_a_url_that_tasks_do_not_share_names_the_remedies_on_each_task(tasks):
    cluster = local_cluster(2)
    for index in range(2):
        tasks.start(cluster, index, "--config.backup.dir=memory://backups")
    for index, process in enumerate(tasks.processes):
        assert process.wait(150) == 2, tasks.log(index)
        log = tasks.log(index)
        assert "tfdist: backup_dir 'memory://backups' must be a folder that all tasks share, but task 1 does" in log
        for remedy in (
            "backup_dir=..., ",
            "--config.backup.dir=...",
            "no backup_dir, ",
            "--config.backup.save_freq=never",
        ):
            assert remedy in log
        assert "says why" not in log and "Traceback" not in log


@pytest.mark.full  # tests/multiprocess/test_unshared.py resumes so from several folders of one host
def test_two_hosts_that_share_no_disk_resume_to_the_bit_after_kill_9(tasks):
    """Each host has its own disk at the path of the work directory; the second host's disk is new after the kill."""
    if missing := two_hosts_lib.missing():
        pytest.skip(missing)
    disk = tasks.folder / "disk"
    disk.mkdir()
    more = ["--config.epochs=12", "--config.deterministic", f"--workdir={disk / 'run'}"]

    def start(hosts, name, *options):
        cluster = ClusterSpec({"worker": [f"{address}:2222" for address in two_hosts_lib.ADDRESSES]})
        started = []
        for index, on in enumerate(hosts):
            (source := tasks.folder / f"{name}-{index}").mkdir(exist_ok=True)
            mounted = ["sh", "-c", f'mount --bind {source} {disk} && exec "$@"', "sh"]
            started.append(
                tasks.start(cluster, index, *more, *options, before=[*on, *mounted], TF_NUM_INTRAOP_THREADS="1")
            )
        return started

    def finish(processes):
        for number, process in enumerate(processes, len(tasks.processes) - 2):
            assert process.wait(200) == 0, tasks.log(number)

    with two_hosts_lib.two(tasks.folder) as hosts:
        finish(start(hosts, "whole", "--config.backup.save_freq=never"))
        killed = start(hosts, "host", "--config.backup.save_freq=1")
        chiefs, others = (tasks.folder / f"host-{index}" / "run" for index in range(2))
        until(lambda: any(chiefs.glob("backup/step-*/manifest.json")) or killed[0].poll() is not None, 200)
        for process in killed:  # at once: one that is left ends within milliseconds
            process.kill()
        for process in killed:
            assert process.wait() == -signal.SIGKILL, tasks.log(2)
        assert not any(others.rglob("step-*"))
        shutil.rmtree(others)
        finish(start(hosts, "host", "--config.backup.save_freq=1"))
    assert "the tasks do not share backup_dir" in tasks.log(4) and "resuming from step" in tasks.log(4)
    assert not (chiefs / "backup").exists()
    weights = [
        keras.saving.load_model(path / "model.keras").get_weights()
        for path in (tasks.folder / "whole-0" / "run", chiefs)
    ]
    for resumed, whole in zip(*weights, strict=True):
        np.testing.assert_array_equal(resumed, whole)


@pytest.mark.full  # tasks of any launcher wait for each other, if shorter; tests/cluster/test_preflight.py has the wait's end
def test_tasks_may_start_in_any_order(tasks):
    cluster = local_cluster(2)
    tasks.start(cluster, 1)
    until(lambda: "waiting for worker:0" in tasks.log(), 120)
    tasks.start(cluster, 0)
    tasks.finish()


@pytest.mark.full  # roles that wait in vain have a server whose port is taken
def test_who_has_the_port_is_named_at_once(tasks):
    cluster = local_cluster(2)
    port = int(cluster.address(TaskSpec("worker", 0)).rpartition(":")[2])
    with socket.create_server(("", port)):
        process = tasks.start(cluster, 0)
        assert process.wait(120) == 1
    said = rf"worker:0 cannot listen at 127.0.0.1:{port}: port {port} is taken by pid {os.getpid()} \(.+\)\."
    assert re.search(said, tasks.log())


@pytest.mark.full
def test_a_task_of_another_cluster_is_named(tasks):
    cluster = local_cluster(2)
    (first, second), (third,) = cluster.jobs["worker"], local_cluster(1).jobs["worker"]
    tasks.start(ClusterSpec({"worker": [third, second]}), 1)
    until(lambda: "waiting for worker:0" in tasks.log(), 120)
    late = tasks.start(ClusterSpec({"worker": [first, second]}), 0, "--config.start_timeout=5")
    assert late.wait(120) == 1
    assert f"worker:1 at {second} (worker:1 of a cluster with other addresses answers there)" in tasks.log(1)


@pytest.mark.full
def test_a_proxy_is_passed_by(tasks):
    cluster = local_cluster(2)
    for index in range(2):
        tasks.start(cluster, index, http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    tasks.finish()


@pytest.mark.full
def test_a_name_may_come_late(tasks, tmp_path):
    """As on Kubernetes: a peer's name is not known before its pod is."""
    if two_hosts_lib.missing():
        pytest.skip(two_hosts_lib.missing())
    first, second = free_ports(2)
    cluster = ClusterSpec({"worker": [f"early-peer:{first}", f"late-peer:{second}"]})
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost early-peer\n")
    own = ["unshare", "--mount", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh"]
    tasks.start(cluster, 0, before=own)
    tasks.start(cluster, 1, before=own)
    began = time.monotonic()
    until(lambda: "waiting for worker:1 at late-peer" in tasks.log(), 120)
    time.sleep(max(0.0, 20 - (time.monotonic() - began)))
    assert all(process.poll() is None for process in tasks.processes), tasks.log()
    names.write_text("127.0.0.1 localhost early-peer late-peer\n")
    tasks.finish()
    assert re.search(r"waiting for worker:1 at late-peer:\d+ \(.*name", tasks.log())


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    if two_hosts_lib.missing():
        pytest.skip(two_hosts_lib.missing())
    with two_hosts_lib.two(tmp_path_factory.mktemp("hosts")) as commands:
        yield commands


@pytest.mark.full
def test_two_hosts_train(tasks, two_hosts):
    given = f"--hosts={','.join(two_hosts_lib.NAMES)}"
    for command in two_hosts:
        tasks.start(None, 0, given, before=command)
    tasks.finish()
    assert "multi_worker_mirrored: 2 replicas" in tasks.log(0) + tasks.log(1)


@pytest.mark.full
def test_a_host_that_is_stopped_before_the_start_is_reported_by_the_other(tasks, two_hosts):
    given = f"--hosts={','.join(two_hosts_lib.ADDRESSES)}"
    second = tasks.start(None, 0, given, before=two_hosts[1])
    time.sleep(0.5)
    second.kill()  # before the first one starts, which it might meet on a busy machine
    second.wait()
    first = tasks.start(None, 0, given, "--config.start_timeout=8", before=two_hosts[0])
    assert first.wait(120) == 1
    assert f"Waited 8 s for worker:1 at {two_hosts_lib.ADDRESSES[1]}:2222 (connection refused)" in tasks.log(1)


@pytest.mark.full
def test_hosts_that_both_mean_themselves_are_told_so(tasks, two_hosts):
    cluster = local_cluster(2)
    for index, command in enumerate(two_hosts):
        tasks.start(cluster, index, "--config.start_timeout=4", before=command)
    for number, process in enumerate(tasks.processes):
        assert process.wait(120) == 1
        assert f"Waited 4 s for worker:{1 - number}" in tasks.log(number)
        assert "127.0.0.1 is each host's own address: for tasks on several hosts, use addresses" in tasks.log(number)


def test_all_hosts_can_be_checked_before(tmp_path):
    """Each on its own, one after another; and an evaluator, which nobody waits for."""
    cluster = local_cluster(3)
    # First the one for which none of the others stays: they end 5 s after the last of them has come.
    members = [TaskSpec("evaluator", 0), *cluster.tasks()]

    def check(task, *more):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": cluster.to_tf_config(task)}
        command = [sys.executable, "-m", "tfdist.cluster", "check", "--connect", *more]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    processes = []
    for task in members:
        processes.append(check(task))
        time.sleep(0.5)
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert all("OK: all tasks can be reached" in each for each in said)
    alone = check(cluster.chief, "--timeout=2")
    said = alone.communicate(timeout=60)[0]
    assert alone.returncode == 1 and "Waited 2 s for worker:1 at" in said and "worker:2 at" in said


@pytest.mark.full
def test_a_process_may_make_a_second_strategy(tmp_path):
    """Whose server is there: its own port is not taken by another."""
    script = "import tfdist\nfor _ in range(2):\n    tfdist.create_strategy('multi_worker_mirrored')\nprint('made')"
    cluster = local_cluster(1)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": cluster.to_tf_config(TaskSpec("worker", 0))}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr
