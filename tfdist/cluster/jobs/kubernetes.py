"""The manifests that run a training under Kubernetes: `tfdist cluster emit --target=kubernetes` or `trainjob`. No TensorFlow here."""

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
from tfdist.runtime.end.process_end import FAULTY_CONFIG, PREEMPTED

_TRAINER = "trainer.kubeflow.org/v1alpha1"


def _pods(
    config: TrainConfig, workdir: pathlib.PurePath | str, arguments: Sequence[str], job: Job, name: str = "train"
) -> dict[str, Any]:
    """Returns the specification of an Indexed Job, whose container has the name. A headless service of the job's name resolves the pods' names."""
    fault = ""
    if not isinstance(workdir, str) and not workdir.is_absolute():
        fault = (
            f"workdir must be an absolute path, where the volume is mounted. Received: {format_value(str(workdir))}."
        )
    check(config, job, fault)
    size = tasks(config)
    requests = {"cpu": str(job.cpus), "memory": f"{job.memory}i"}
    limits = {"memory": requests["memory"]}
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus)
    container: dict[str, Any] = {
        "name": name,
        "image": job.image,
        # Kubernetes would replace `$(NAME)` by a variable's value, but in a flag it is ordinary text.
        "command": [word.replace("$(", "$$(") for word in shlex.split(command(arguments))],
        "env": [
            {"name": "TFDIST_PODS", "value": str(size)},
            {"name": "TFDIST_SERVICE", "value": job.name},
        ],
        "ports": [{"containerPort": environment.PORT, "name": "tensorflow"}],
        "resources": {"requests": requests, "limits": limits},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # the job creates a new pod
        "subdomain": job.name,
        "terminationGracePeriodSeconds": math.ceil(config.grace_seconds) + 5,
        "containers": [container],
    }
    if not isinstance(workdir, str):
        container["volumeMounts"] = [{"name": "work", "mountPath": str(workdir)}]
        pod["volumes"] = [{"name": "work", "persistentVolumeClaim": {"claimName": job.claim}}]
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [FAULTY_CONFIG]}},
        {"action": "Ignore", "onExitCodes": {"containerName": name, "operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": size,
        "parallelism": size,
        # If one pod fails, all pods fail, and each failure counts.
        "backoffLimit": config.max_restarts * size,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": job.name}}, "spec": pod},
    }


def _resource(version: str, kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": job.name, "labels": {"app.kubernetes.io/name": job.name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _text(workdir: pathlib.PurePath | str, job: Job, *resources: dict[str, Any]) -> str:
    """Returns the resources after comments on the needs of the pods."""
    import yaml

    needs = f"# Needs access to {workdir} from the pods, such as by a service account; no volume.\n"
    if not isinstance(workdir, str):
        needs = f"# Needs a PersistentVolumeClaim {job.claim} that all pods can read and write (ReadWriteMany): the work directory is there.\n"
    needs += f"# Needs an image {job.image} with Python, tfdist and your code.\n"
    return needs + str(yaml.safe_dump_all(resources, sort_keys=False))


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
    pods = _pods(config, workdir, arguments, job)
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods resolve each other's names before they are ready
        "selector": {"batch.kubernetes.io/job-name": job.name},
        "ports": [{"name": "tensorflow", "port": environment.PORT}],
    }
    return _text(workdir, job, _resource("v1", "Service", job, service), _resource("batch/v1", "Job", job, pods))


def train_job(config: TrainConfig, workdir: pathlib.PurePath | str, arguments: Sequence[str], job: Job) -> str:
    """Returns the manifests of a TrainJob of Kubeflow Trainer 2, and of its runtime, without a policy of another framework.

    Its JobSet makes the headless service. Takes the arguments of `manifests`, and raises its errors.
    """
    # Kubeflow Trainer knows the training's pods by the label, and their container by the name `node`.
    pods = _pods(config, workdir, arguments, job, "node")
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": pods}
    runtime = {
        "mlPolicy": {"numNodes": tasks(config)},  # replaces the number of pods, 1 by default
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}},
    }
    resources = [
        _resource(_TRAINER, "TrainingRuntime", job, runtime),
        _resource(_TRAINER, "TrainJob", job, {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}}),
    ]
    return _text(workdir, job, *resources)
