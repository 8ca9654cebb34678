"""A Slurm of this machine's own: munge, a controller and one node; started and ended by whoever asks for it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import psutil

from tfdist.cluster import free_ports

TOOLS = ("munged", "munge", "slurmctld", "slurmd", "srun", "sinfo")


def missing() -> str:
    """Returns why there can be no Slurm here, or an empty text."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"Slurm is not installed ({', '.join(lacking)}): make system-deps"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Runs it, with its files in `folder`; yields what the environment of its commands needs.

    Args:
        folder: Of a path that is short, as a socket lies in it.
    """
    host = socket.gethostname().partition(".")[0]
    controller, node = free_ports(2)
    key, munge_socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=1000
PartitionName=main Nodes={host} Default=YES State=UP OverSubscribe=YES
""")
    for each in ("state", "spool"):
        (folder / each).mkdir()
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    daemons: list[subprocess.Popen[bytes]] = []
    before = _watchers()

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as log:
            daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

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
        start("slurmd", "-D", "-f", str(conf))
        deadline = time.monotonic() + 60
        while (
            subprocess.run(["sinfo", "-h", "-o", "%T"], env=environ, capture_output=True, text=True).stdout.strip()
            != "idle"
        ):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.out"))
                raise RuntimeError(f"Slurm does not start:\n{logs}")
            time.sleep(0.2)
        yield {"SLURM_CONF": str(conf)}
    finally:
        subprocess.run(["scancel", "--full", "--user=root"], env=environ, capture_output=True, timeout=60)
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
