"""A job on two hosts goes on when one of them disappears, and takes it back."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.helpers import two_hosts
from tests.multiprocess import harness
from tests.multiprocess.test_resize import run
from tests.multiprocess.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(two_hosts.missing()), reason=two_hosts.missing() or "there are namespaces"),
]


class Hosts:
    """Launchers on two hosts, with two workers each."""

    def __init__(self, hosts, folder, kill_at, stack, **environ):
        self.folder, self._stack, self.jobs = folder, stack, {}
        self._commands = two_hosts.commands(hosts, folder)
        flags = [
            f"--hosts={','.join(two_hosts.NAMES)}",
            "--nnodes=1:2",
            "--workers_per_host=2",
            "--join_seconds=5",
            "--",
        ]
        program = [
            sys.executable,
            "-m",
            "tests.multiprocess.resize_program",
            "multi_worker_mirrored",
            str(folder / "out"),
        ]
        self._command = [
            sys.executable,
            "-m",
            "tfdist.launch",
            *flags,
            *program,
            "",
            str(folder / "backup"),
            "none",
            str(kill_at),
        ]
        self._environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), **environ}

    def start(self, host):
        with self.log(host).open("ab") as out:
            command = [*self._commands[host], *self._command]
            place = self.folder / f"host{host}"
            place.mkdir(exist_ok=True)
            job = subprocess.Popen(command, env=self._environ, cwd=place, stdout=out, stderr=out)
        self._stack.callback(job.wait)
        self._stack.callback(job.terminate)
        self.jobs[host] = job

    def log(self, host):
        return self.folder / f"host{host}.log"

    def text(self, host):
        return self.log(host).read_text()

    def end(self):
        codes = {host: job.wait(300) for host, job in self.jobs.items()}
        assert codes == {0: 0, 1: 0}, self.text(0) + self.text(1)
        return harness.load(self.folder / "out", 0)


@pytest.fixture
def undisturbed(tmp_path):
    return run(tmp_path / "alone", 0, 0, 4)[0]


def test_a_job_goes_on_without_a_host_whose_launcher_was_killed_and_takes_it_back(tmp_path, undisturbed):
    with two_hosts.joined() as found, contextlib.ExitStack() as stack:
        hosts = Hosts(found, tmp_path, 13, stack, TFDIST_TEST_KILLS_LAUNCHER="1")
        hosts.start(0)
        hosts.start(1)
        wait_until(lambda: "round 2: node0, without node1" in hosts.text(0), 120)
        hosts.start(1)
        assert hosts.end() == undisturbed
        assert "starting again on more hosts" in hosts.text(0)
        assert "round 3: node0, node1" in hosts.text(0)


@pytest.mark.slow
def test_a_job_goes_on_without_a_host_that_does_not_answer_and_takes_it_back(tmp_path, undisturbed):
    with two_hosts.joined() as found, contextlib.ExitStack() as stack:
        hosts = Hosts(found, tmp_path, 0, stack)
        hosts.start(0)
        hosts.start(1)
        wait_until(lambda: "round 1: node0, node1" in hosts.text(0), 120)
        wait_until((tmp_path / "backup" / "step-3").exists, 120)
        with two_hosts.outage(found, "silent"):
            wait_until(lambda: "round 2: node0, without node1" in hosts.text(0), 200)
        assert hosts.end() == undisturbed
        assert "round 3: node0, node1" in hosts.text(0)
