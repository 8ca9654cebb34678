"""The manifests that run a training under Kubernetes: `tfdist cluster emit --target=kubernetes`. No TensorFlow here."""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.jobs.job import Job, check, command, tasks
from tfdist.cluster.resolvers import environment
from tfdist.config import TrainConfig
from tfdist.errors import format_value
from tfdist.runtime.process_end import FAULTY_CONFIG, PREEMPTED


def manifests(config: TrainConfig, workdir: pathlib.PurePath | str, arguments: Sequence[str], job: Job) -> str:
    """Returns the manifests of an Indexed Job, and of a headless service that resolves the pods' names.

    Args:
        config: The configuration of the run.
        workdir: The folder of the results, at which the volume is mounted, or its URL (a text), which needs no volume.
        arguments: The flags of `tfdist train` for `config` and `workdir`.
        job: The resources and names.

    Raises:
        ConfigError: `job` is invalid, the configuration names a cluster, or the work directory is not an absolute path; the error
            lists every problem.
    """
    import yaml

    relative = f"workdir must be an absolute path, where the volume is mounted. Received: {format_value(str(workdir))}."
    check(config, job, "" if isinstance(workdir, str) or workdir.is_absolute() else relative)
    size = tasks(config)
    labels = {"app.kubernetes.io/name": job.name}
    resources: dict[str, Any] = {"cpu": str(job.cpus), "memory": f"{job.memory}i"}
    limits = {"memory": resources["memory"], **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {})}
    container = {
        "name": "train",
        "image": job.image,
        # Kubernetes would replace `$(NAME)` by a variable's value, but in a flag it is ordinary text.
        "command": [word.replace("$(", "$$(") for word in shlex.split(command(arguments))],
        "env": [
            {"name": "TFDIST_PODS", "value": str(size)},
            {"name": "TFDIST_SERVICE", "value": job.name},
        ],
        "ports": [{"containerPort": environment.PORT, "name": "tensorflow"}],
        "resources": {"requests": resources, "limits": limits},
    }
    pod = {
        "restartPolicy": "Never",  # the job creates a new pod
        "subdomain": job.name,
        "terminationGracePeriodSeconds": math.ceil(config.grace_seconds) + 5,
        "containers": [container],
    }
    needs = f"# Needs access to {workdir} from the pods, such as by a service account; no volume.\n"
    if not isinstance(workdir, str):
        needs = f"# Needs a PersistentVolumeClaim {job.claim} that all pods can read and write (ReadWriteMany): the work directory is there.\n"
        container["volumeMounts"] = [{"name": "work", "mountPath": str(workdir)}]
        pod["volumes"] = [{"name": "work", "persistentVolumeClaim": {"claimName": job.claim}}]
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [FAULTY_CONFIG]}},
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": dict(labels)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods resolve each other's names before they are ready
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "tensorflow", "port": environment.PORT}],
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
            # If one pod fails, all pods fail, and each failure counts.
            "backoffLimit": config.max_restarts * size,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }
    comments = f"{needs}# Needs an image {job.image} with Python, tfdist and your code.\n"
    return comments + str(yaml.safe_dump_all([service, training], sort_keys=False))
