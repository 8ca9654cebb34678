"""A training as a job of Slurm or Kubernetes: `python -m tfdist.cluster emit`. No TensorFlow here.

Both start again what ends with exit code 75: a training that was told to end (SIGTERM) and has saved.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist import host_list
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError, shown
from tfdist.progress import PREEMPTED

_FAULTY = 2  # exit code of a configuration that no restart mends


@dataclasses.dataclass(frozen=True)
class Job:
    """What the systems are told besides the command.

    Attributes:
        name: The job's name.
        cpus: Cores for each task.
        memory: Memory for each task, as `4G`.
        gpus: GPUs for each task.
        image: The container's image, with tfdist and the task's code. Kubernetes alone.
        claim: The PersistentVolumeClaim, of access mode ReadWriteMany, that holds the work directory. Kubernetes alone.
        time: The time limit, as `2:00:00`; empty means the partition's. Slurm alone.
        notice: Seconds before the time limit at which tasks are told to save. Slurm alone.
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
        """Yields what is wrong with it."""
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            yield f"name must be lower-case letters, digits and '-', at most 42. Received: {shown(self.name)}."
        if not re.fullmatch(r"[1-9][0-9]*[KMGT]", self.memory):
            yield f"memory must be a number with K, M, G or T, such as 4G. Received: {shown(self.memory)}."
        if not re.fullmatch(r"[a-z0-9][-._/:@a-zA-Z0-9]*", self.image):
            yield f"image must be such as registry.example/team/image:tag. Received: {shown(self.image)}."
        if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", self.claim):
            yield f"claim must be lower-case letters, digits, '-' and '.'. Received: {shown(self.claim)}."
        if self.cpus < 1 or self.gpus < 0:
            yield f"cpus must be 1 or more, and gpus 0 or more. Received: {self.cpus} and {self.gpus}."
        if not 0 < self.notice < 2**16:
            yield f"notice must be 1 to 65535 seconds. Received: {self.notice}."
        if self.time and not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", self.time):
            yield f"time must be such as 2:00:00 or 1-12. Received: {shown(self.time)}."


def tasks(config: TrainConfig) -> int:
    """Returns how many processes a configuration asks for."""
    return config.cluster.workers + config.cluster.ps + (config.cluster.ps > 0)


def slurm(config: TrainConfig, workdir: pathlib.PurePath, arguments: Sequence[str], job: Job) -> str:
    """Returns an sbatch script.

    Args:
        config: What is trained.
        workdir: Where results go, a folder that all nodes share.
        arguments: The flags of `tfdist.train` that say so.
        job: The rest.

    Raises:
        ConfigError: With every fault of `job`, or the configuration has a cluster of its own.
    """
    short = f"notice must be grace_seconds, {config.grace_seconds:g} s, or more, in which tasks save. Received: {job.notice}."
    _check(config, job, short if job.notice < config.grace_seconds else "")
    options = [
        f"--job-name={job.name}",
        f"--ntasks={tasks(config)}",
        f"--cpus-per-task={job.cpus}",
        f"--mem-per-cpu={max(1, _megabytes(job.memory) // job.cpus)}M",
        *([f"--gpus-per-task={job.gpus}"] if job.gpus else []),
        *([f"--time={job.time}"] if job.time else []),
        f"--signal=TERM@{job.notice}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/bin/bash
{lines}

# {job.notice} s before the time limit, or at `scancel --signal=TERM JOB`, the tasks save and end with exit code {PREEMPTED}.
# One that ends first must not have the others killed: they may still be saving.
srun --cpus-per-task={job.cpus} --kill-on-bad-exit=0 --wait=0 --label {_command(arguments)}
code=$?
if [ "$code" -eq {PREEMPTED} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes(config: TrainConfig, workdir: pathlib.PurePath, arguments: Sequence[str], job: Job) -> str:
    """Returns manifests: a headless service, by which the pods find each other, and an Indexed Job.

    Args:
        config: What is trained.
        workdir: Where results go, and where the volume is mounted.
        arguments: The flags of `tfdist.train` that say so.
        job: The rest.

    Raises:
        ConfigError: With every fault of `job`, the configuration has a cluster of its own, or the work directory is no absolute path.
    """
    import yaml

    relative = f"workdir must be an absolute path, where the volume is mounted. Received: {shown(str(workdir))}."
    _check(config, job, "" if workdir.is_absolute() else relative)
    size = tasks(config)
    labels = {"app.kubernetes.io/name": job.name}
    resources: dict[str, Any] = {"cpu": str(job.cpus), "memory": f"{job.memory}i"}
    limits = {"memory": resources["memory"], **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {})}
    container = {
        "name": "train",
        "image": job.image,
        "command": shlex.split(_command(arguments)),
        "env": [
            {"name": "TFDIST_PODS", "value": str(size)},
            {"name": "TFDIST_SERVICE", "value": job.name},
        ],
        "ports": [{"containerPort": host_list.PORT, "name": "tensorflow"}],
        "resources": {"requests": resources, "limits": limits},
        "volumeMounts": [{"name": "work", "mountPath": str(workdir)}],
    }
    pod = {
        "restartPolicy": "Never",  # the job makes a new pod
        "subdomain": job.name,
        "terminationGracePeriodSeconds": math.ceil(config.grace_seconds) + 5,
        "containers": [container],
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": job.claim}}],
    }
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [_FAULTY]}},
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": dict(labels)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for each other before they are ready
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "tensorflow", "port": host_list.PORT}],
        },
    }
    training = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": dict(labels)},
        "spec": {
            "completionMode": "Indexed",
            "completions": size,
            "parallelism": size,
            # One that fails takes all with it.
            "backoffLimit": config.max_restarts * size,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }
    return str(yaml.safe_dump_all([service, training], sort_keys=False))


def _check(config: TrainConfig, job: Job, fault: str) -> None:
    faults = [*job.faults(), *([fault] if fault else [])]
    for name in (*host_list.FLAGS, "source"):
        if (value := getattr(config.cluster, name)) not in ("", "auto"):
            faults.append(
                f"cluster.{name} is not for a job, whose tasks the scheduler places. Received: {shown(value)}."
            )
    if faults:
        raise ConfigError(faults)


def _command(arguments: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "tfdist.train", *arguments])


def _megabytes(memory: str) -> int:
    number, unit = int(memory[:-1]), memory[-1]
    return max(1, number * 1024 ** "KMGT".index(unit) // 1024)
