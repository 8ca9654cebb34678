"""`Job`: the resources and names that a scheduler needs besides the command, and their checks. No TensorFlow here.

Schedulers restart a job that ends with exit code 75: training that received SIGTERM and has saved.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence

from tfdist.config import TrainConfig, cluster
from tfdist.config.ranges import Range
from tfdist.errors import ConfigError, format_value


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of a job besides its command.

    Attributes:
        name: The job's name.
        cpus: Cores for each task.
        memory: Memory for each task, as `4G`.
        gpus: GPUs for each task.
        image: The container's image, with tfdist and the task's code. Only for Kubernetes.
        claim: The PersistentVolumeClaim, of access mode ReadWriteMany, that holds the work directory. Only for Kubernetes.
        time: The time limit, as `2:00:00`; empty means the partition's. Only for Slurm.
        notice: Seconds before the time limit at which Slurm sends SIGTERM, so that tasks save. Only for Slurm.
    """

    name: str = "tfdist"
    cpus: int = 1
    memory: str = "4G"
    gpus: int = 0
    image: str = "tfdist:latest"
    claim: str = "tfdist"
    time: str = ""
    notice: int = 120

    def faults(self) -> Iterator[str]:
        """Yields the errors in the job."""
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            yield f"name must be lower-case letters, digits and '-', at most 42. Received: {format_value(self.name)}."
        if not re.fullmatch(r"[1-9][0-9]{0,8}[KMGT]", self.memory):
            yield f"memory must be a number with K, M, G or T, such as 4G. Received: {format_value(self.memory)}."
        if not re.fullmatch(r"[a-z0-9][-._/:@a-zA-Z0-9]*", self.image):
            yield f"image must be such as registry.example/team/image:tag. Received: {format_value(self.image)}."
        if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", self.claim):
            yield f"claim must be lower-case letters, digits, '-' and '.'. Received: {format_value(self.claim)}."
        yield from Range(1, 10_000).faults("cpus", self.cpus)
        yield from Range(0, 1000).faults("gpus", self.gpus)
        if not 0 < self.notice < 2**16:
            yield f"notice must be 1 to 65535 seconds. Received: {self.notice}."
        if self.time and not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", self.time):
            yield f"time must be such as 2:00:00 or 1-12. Received: {format_value(self.time)}."


def tasks(config: TrainConfig) -> int:
    """Returns the number of tasks of a configuration."""
    return cluster.worker_range(config.cluster.workers).most + config.cluster.ps + (config.cluster.ps > 0)


def check(config: TrainConfig, job: Job, fault: str) -> None:
    """Checks a job and the configuration that it trains.

    Args:
        config: The configuration.
        job: The job.
        fault: An error message from the scheduler's own check, or an empty text.

    Raises:
        ConfigError: The job or the configuration is invalid; the error lists every problem.
    """
    faults = [*job.faults(), *([fault] if fault else [])]
    for name in (*cluster.FLAGS, "source"):
        if (value := getattr(config.cluster, name)) not in ("", "auto"):
            faults.append(
                f"cluster.{name} is not for a job, whose tasks the scheduler places. Received: {format_value(value)}."
            )
    if cluster.worker_range(config.cluster.workers).is_elastic:
        faults.append(
            "cluster.workers must be one number for a job, whose tasks the scheduler starts and restarts. "
            f"Received: {format_value(config.cluster.workers)}."
        )
    if faults:
        raise ConfigError(faults)


def command(arguments: Sequence[str]) -> str:
    """Returns the shell command of each task. It runs the module, because the script `tfdist` may not be on the hosts' PATH.

    Args:
        arguments: The flags of `tfdist train`.
    """
    return shlex.join(["python", "-m", "tfdist.train", *arguments])
