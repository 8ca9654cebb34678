"""A Slurm of this machine's own: munge, a controller and its nodes; started and ended by whoever asks for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

import psutil

from tfdist.cluster import free_ports

TOOLS = ("munged", "munge", "slurmctld", "slurmd", "srun", "sinfo")


def missing() -> str:
    """Returns why there can be no Slurm here, or an empty text."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"Slurm is not installed ({', '.join(lacking)}): make system-deps"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@dataclasses.dataclass(frozen=True)
class Node:
    """A host, and the words that run a command on it."""

    name: str
    address: str
    on: Sequence[str] = ()


@contextlib.contextmanager
def running(folder: pathlib.Path, nodes: Sequence[Node] = ()) -> Iterator[dict[str, str]]:
    """Runs it, with its files in `folder`; yields what the environment of its commands needs.

    Args:
        folder: Of a path that is short, as a socket lies in it.
        nodes: Its nodes, the first of which is the controller, too; none means this machine alone.
    """
    nodes = nodes or [Node(socket.gethostname().partition(".")[0], "127.0.0.1")]
    controller, node = free_ports(2)
    key, munge_socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=tests
# Ports of tasks follow from the job's number: that of another test's cluster, at the same time, must be another one.
FirstJobId={controller}
SlurmctldHost={nodes[0].name}({nodes[0].address})
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=bf_interval=1
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=YES
""")
    with conf.open("a") as file:
        for each in nodes:
            file.write(f"NodeName={each.name} NodeAddr={each.address} CPUs={os.cpu_count()} RealMemory=1000\n")
    for each in ("state", *(f"spool-{node.name}" for node in nodes)):
        (folder / each).mkdir()
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    daemons: list[subprocess.Popen[bytes]] = []
    before = _watchers()

    def start(*command: str, on: Node = nodes[0]) -> None:
        with (folder / f"{command[0]}-{on.name}.out").open("wb") as log:
            daemons.append(
                subprocess.Popen([*on.on, *command], env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def command(*words: str) -> str:
        done = subprocess.run([*nodes[0].on, *words], env=environ, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    try:
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge_socket}",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
            f"--log-file={folder}/munged.log",
        )
        start("slurmctld", "-D", "-f", str(conf))
        for each in nodes:
            start("slurmd", "-D", "-f", str(conf), on=each)
        deadline = time.monotonic() + 60
        while command("sinfo", "-h", "-o", "%T %D") != f"idle {len(nodes)}":
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.out"))
                raise RuntimeError(f"Slurm does not start:\n{logs}")
            time.sleep(0.2)
        yield {"SLURM_CONF": str(conf)}
    finally:
        command("scancel", "--full", "--user=root")
        _, left = psutil.wait_procs([each for each in _watchers() if each not in before], 30)
        for process in left:
            process.kill()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _watchers() -> list[psutil.Process]:
    """Returns the processes that watch a job's; each ends once it has told the daemons of the job's end."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"]
