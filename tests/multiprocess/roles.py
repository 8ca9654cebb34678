"""A cluster whose tasks are started one by one, as on several hosts: each with its TF_CONFIG, and no launcher."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import threading
import time

from tests.helpers import fork_server, two_hosts
from tfdist.cluster import ClusterSpec, TaskSpec, local_cluster

ROOT = pathlib.Path(__file__).parents[2]
SIGNALS = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class Roles:
    """Starts every task of a parameter-server cluster; a context manager that ends them all.

    A task may ask for a signal to another one, or for its start, with `ask`: so the moment is the chief's own.
    """

    def __init__(self, command: list[str], folder: pathlib.Path, workers: int = 2, ps: int = 2):
        self.command = command
        self.folder = folder
        self.cluster = local_cluster(workers, ps)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._helper = threading.Thread(target=self._answer)

    def __enter__(self) -> Roles:
        (self.folder / "asked").mkdir(parents=True)
        for task in self.cluster.tasks():
            self.start(str(task))
        self._helper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._helper.join()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, task: str) -> None:
        kind, index = task.split(":")
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
        environ |= {"TF_CONFIG": self.cluster.to_tf_config(TaskSpec(kind, int(index))), "ROLES": str(self.folder)}
        with (self.folder / f"{kind}-{index}.log").open("ab") as log:
            self.processes[task] = subprocess.Popen(
                self.command_of(task), env=environ, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def command_of(self, task: str) -> list[str]:
        return self.command

    def send(self, what: str, task: str) -> None:
        self.processes[task].send_signal(SIGNALS[what])

    def log(self, task: str) -> str:
        return (self.folder / f"{task.replace(':', '-')}.log").read_text()

    def wait(self, task: str, seconds: float) -> int:
        return self.processes[task].wait(timeout=seconds)

    def _answer(self) -> None:
        while not self._over.wait(0.05):
            for path in sorted((self.folder / "asked").glob("*.do")):
                what, task = path.read_text().split()
                if what == "kill":
                    fork_server.kill(self.processes[task])
                elif what in SIGNALS:
                    self.send(what, task)
                else:
                    self.start(task)
                path.rename(path.with_suffix(".done"))


class RolesOnTwoHosts(Roles):
    """One task is on a host of its own.

    Args:
        hosts: For each of the two hosts the words that run a command on it, as of `two_hosts.two`.
        away: The task that is alone on the second.
    """

    def __init__(
        self,
        command: list[str],
        folder: pathlib.Path,
        hosts: list[list[str]],
        away: str,
        workers: int = 2,
        ps: int = 1,
    ):
        super().__init__(command, folder, workers, ps)
        self.hosts, self.away = hosts, away
        jobs = {job: list(addresses) for job, addresses in self.cluster.jobs.items()}
        for task in self.cluster.tasks():
            port = self.cluster.address(task).rsplit(":", 1)[1]
            jobs[task.type][task.index] = f"{two_hosts.ADDRESSES[str(task) == away]}:{port}"
        self.cluster = ClusterSpec(jobs)

    def command_of(self, task: str) -> list[str]:
        return [*self.hosts[task == self.away], *self.command]


def ask(what: str, task: str) -> None:
    """Asks for `what` ("kill", "stop", "continue" or "start") to be done to `task`, and waits until it is."""
    folder = pathlib.Path(os.environ["ROLES"], "asked")
    name = f"{time.monotonic_ns()}"
    (folder / f"{name}.tmp").write_text(f"{what} {task}")
    (folder / f"{name}.tmp").rename(folder / f"{name}.do")
    deadline = time.monotonic() + 30
    while not (folder / f"{name}.done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
