"""`Job`: the resources and names that a scheduler needs besides the command, and their checks. No TensorFlow here.

Schedulers restart a job that ends with exit code 75: training that received SIGTERM and has saved.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from tfdist.config import TrainConfig, cluster
from tfdist.config.constraints import between, field_faults, matches, option
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

    name: str = option(
        "tfdist", *matches("lower-case letters, digits and '-', at most 42", "[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
    )
    cpus: int = option(1, *between(1, 10_000))
    memory: str = option("4G", *matches("a number with K, M, G or T, such as 4G", "[1-9][0-9]{0,8}[KMGT]"))
    gpus: int = option(0, *between(0, 1000))
    image: str = option(
        "tfdist:latest", *matches("such as registry.example/team/image:tag", "[a-z0-9][-._/:@a-zA-Z0-9]*")
    )
    claim: str = option(
        "tfdist", *matches("lower-case letters, digits, '-' and '.'", "[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
    )
    time: str = option("", *matches("such as 2:00:00 or 1-12", "(([0-9]+-)?[0-9]+(:[0-9]+){0,2})?"))
    notice: int = option(120, "1 to 65535 seconds", lambda seconds: 0 < seconds < 2**16)


def tasks(config: TrainConfig) -> int:
    """Returns the number of tasks of a configuration."""
    return cluster.worker_range(config.cluster.workers).most + config.cluster.ps + (config.cluster.ps > 0)


def check(config: TrainConfig, job: Job, fault: str) -> None:
    """Checks a job and the configuration that it trains; `fault` is an error of the scheduler's own check, or an empty text.

    Raises:
        ConfigError: The job or the configuration is invalid; the error lists every problem.
    """
    faults: list[str] = []
    for field in dataclasses.fields(job):
        faults += field_faults(field.name, getattr(job, field.name), field)
    if fault:
        faults.append(fault)
    unset = {**dict.fromkeys(cluster.FLAGS, ""), "source": "auto", "ray": ""}
    for name, default in unset.items():
        value = getattr(config.cluster, name)
        if value not in ("", default):
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
    """Returns the shell command of each task, by the flags of `tfdist train`.

    It runs the module, because the script `tfdist` may not be on the hosts' PATH.
    """
    return shlex.join(["python", "-m", "tfdist.train", *arguments])
