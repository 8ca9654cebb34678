"""Runs the arms of `tfdist verify`: the user's command on one device and on several, in copies of the current folder. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import threading
from collections.abc import Sequence

from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.verify.settings import VARIABLE, Settings
from tfdist.verify.verdicts import Arm

NAMES = {
    "A": "one device",
    "B": "one device, again",
    "C": "the wished strategy",
    "D": "the same, killed and resumed",
}
_BYTES_COPIED = 16 * 2**20  # larger files are linked
_FILES_COPIED = 2000  # folders with more files are linked
_TAIL = 15  # lines of the output of an arm that fails
_GRACE = 5.0  # seconds from the end of the time to SIGKILL
# Variables by which a task would find another cluster, or other replicas.
_OF_CLUSTERS = ("TF_CONFIG", "SLURM_", "OMPI_", "PMI_", "TFDIST_", "KUBERNETES_", "SM_")


class DidNotRunError(RuntimeError):
    """An arm that did not train to its end; the message has the reason and the remedy.

    Attributes:
        arm: Its records so far; None without one.
    """

    arm: Arm | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The command, and the cluster of the arms C and D.

    Attributes:
        command: The user's command.
        workers: The number of workers.
        devices: The number of virtual CPUs of each worker; 0 keeps the script's.
        ps: The number of parameter servers.
        compression: The compressor; empty keeps the script's.
        shard_optimizer: Whether to split the optimizer's state.
        steps: The number of updates.
        seed: The seed of the script's random numbers, if it sets none, and of the kill.
    """

    command: Sequence[str]
    workers: int = 1
    devices: int = 0
    ps: int = 0
    compression: str = ""
    shard_optimizer: bool = False
    steps: int = 20
    seed: int = 0

    @property
    def name(self) -> str:
        """The wished strategy, as `2 workers`."""
        parts = []
        if self.workers > 1 or self.ps:
            parts.append(f"{self.workers} worker{'s' * (self.workers > 1)}")
        if self.devices:
            parts.append(f"{self.devices} devices")
        if self.ps:
            parts.append(f"{self.ps} parameter server{'s' * (self.ps > 1)}")
        return ", ".join(parts) or "the script's own strategy"

    def settings(self, arm: str, folder: str, updates: int) -> Settings:
        """Returns the settings of an arm; of the arm D, whose undisturbed training has made so many updates."""
        settings = Settings(folder, steps=self.steps, seed=self.seed)
        if arm in ("A", "B"):
            return dataclasses.replace(settings, strategy="one_device")
        strategy = ""
        if self.ps:
            strategy = "parameter_server"
        elif self.workers > 1:
            strategy = "multi_worker_mirrored"
        elif self.devices:
            strategy = "mirrored"
        settings = dataclasses.replace(
            settings,
            strategy=strategy,
            devices=self.devices,
            compression=self.compression,
            shard_optimizer=self.shard_optimizer,
        )
        if arm == "C":
            return settings
        draw = random.Random(self.seed)
        save_freq = max(1, updates // 5)
        first = min(2 * save_freq, updates - 1)
        kill_at = draw.randint(first, max(first, updates - 1))
        task = f"worker-{draw.randrange(self.workers)}"
        return dataclasses.replace(settings, save_freq=save_freq, kill_at=kill_at, kill_task=task)


def run(plan: Plan, arm: str, folder: str, seconds: float, updates: int = 0) -> Arm:
    """Runs an arm in a folder of its own, and returns its records.

    Args:
        plan: The command and its cluster.
        arm: `A`, `B`, `C` or `D`.
        folder: The temporary folder.
        seconds: The time after which the arm is ended.
        updates: The number of updates of the arm C, for D.

    Raises:
        DidNotRunError: The command failed, did not end in time, or trained nothing.
        KeyboardInterrupt: The user has pressed Ctrl-C.
    """
    folder = os.path.join(folder, arm)
    copy = os.path.join(folder, "work")
    os.makedirs(copy)
    _copy(os.getcwd(), copy)
    settings = plan.settings(arm, folder, updates)
    settings.write()
    is_alone = arm in ("A", "B")
    cluster = local_cluster(1 if is_alone else plan.workers, 0 if is_alone else plan.ps)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OF_CLUSTERS)}
    environ[VARIABLE] = folder
    environ["PWD"] = copy
    options = Options(
        plan.command,
        cluster,
        os.path.join(folder, "logs"),
        environ=environ,
        grace_seconds=_GRACE,
        max_restarts=1 if arm == "D" else 0,
        fresh_ports=True,
        warm=True,
    )
    path = pathlib.Path(folder) / "output"
    with path.open("wb") as output:
        code, received = _launch(Launcher(options, output), copy, seconds)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        raise DidNotRunError(f"arm {arm} ({NAMES[arm]}) did not end in time: give more --minutes, or fewer --steps")
    mark = pathlib.Path(folder) / "killed"
    tasks = {}
    for record in sorted(pathlib.Path(folder).glob("*.jsonl")):
        # A task that is killed may leave a line without its end.
        lines = record.read_text().rpartition("\n")[0].splitlines()
        tasks[record.stem] = [json.loads(line) for line in lines]
    found = Arm(tasks, int(mark.read_text()) if mark.exists() else None, failed=bool(code))
    if code:
        tail = "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL:])
        error = DidNotRunError(
            f"arm {arm} ({NAMES[arm]}) ended with exit code {code}: correct the error in its output, and run the command again.\n{tail}"
        )
        error.arm = found if found.first else None
        raise error
    if not found.first:
        raise DidNotRunError(
            f"arm {arm} ({NAMES[arm]}) recorded no update: train by fit or trainer.step, not by train_on_batch, a model that is created in trainer.scope()"
        )
    return found


def _launch(launcher: Launcher, folder: str, seconds: float) -> tuple[int, list[int]]:
    """Runs a launcher in a folder, for so many seconds at most; returns the exit code and the signals that have ended it."""
    before = os.getcwd()
    # The launcher ends its tasks for a signal in this list as for one that it has received.
    timer = threading.Timer(max(1.0, seconds), launcher.signals.append, [signal.SIGTERM])
    timer.daemon = True
    os.chdir(folder)
    timer.start()
    try:
        code = launcher.run()
    finally:
        timer.cancel()
        os.chdir(before)
    return code, list(launcher.signals)


def _copy(source: str, target: str) -> None:
    """Copies a folder, so that a script that writes files changes no file of the user's.

    Large files, folders of many files and hidden ones, such as an environment, are linked.
    """
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            to = os.path.join(target, entry.name)
            is_hidden = entry.name.startswith(".")
            if target.startswith(entry.path + os.sep):  # the folder for temporary files
                continue
            if entry.is_file() and not is_hidden and entry.stat().st_size <= _BYTES_COPIED:
                shutil.copy2(entry.path, to)
            elif entry.is_dir() and not is_hidden and not entry.is_symlink() and _is_small(entry.path):
                os.mkdir(to)
                _copy(entry.path, to)
            elif entry.is_file() or entry.is_dir():
                os.symlink(os.path.abspath(entry.path), to)


def _is_small(folder: str) -> bool:
    count = 0
    for _, folders, files in os.walk(folder):
        count += len(files) + len(folders)
        if count > _FILES_COPIED:
            return False
    return True
