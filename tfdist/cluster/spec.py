"""`ClusterSpec`, `TaskSpec` and the TF_CONFIG codec. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.cluster.validation import JOBS, cluster_faults, is_index, parameter_server_faults, task_faults
from tfdist.errors import ConfigError, format_value, truncate


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """One process of a cluster.

    Attributes:
        type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: Its number within the job, from 0.

    Examples:
        >>> import tfdist
        >>> str(tfdist.TaskSpec("worker", 1))
        'worker:1'
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    @property
    def name(self) -> str:
        """The task's name in files and folders, such as `worker-1`."""
        return f"{self.type}-{self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """The addresses of all tasks, by job.

    An evaluator is not a member, because TensorFlow would wait for it without limit (tensorflow#46169). It runs outside the cluster.

    Attributes:
        jobs: The `host:port` of each job's tasks, ordered by index. The keys are `"chief"`, `"worker"` and `"ps"`.

    Raises:
        ConfigError: The jobs or addresses are invalid; the error lists every problem.

    Examples:
        >>> import tfdist
        >>> cluster = tfdist.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
        >>> [str(task) for task in cluster.tasks()]
        ['worker:0', 'worker:1']
    """

    jobs: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        faults = list(cluster_faults(self.jobs))
        if faults:
            raise ConfigError(faults)
        # In the order of JOBS, so that equal clusters print alike.
        object.__setattr__(self, "jobs", {job: tuple(self.jobs[job]) for job in JOBS if self.jobs.get(job)})

    @property
    def chief(self) -> TaskSpec:
        """The task that writes files: `chief:0`, or `worker:0` where there is no chief job."""
        return TaskSpec("chief" if "chief" in self.jobs else "worker", 0)

    def tasks(self) -> list[TaskSpec]:
        """Returns every task, chief first."""
        return [TaskSpec(job, index) for job, addresses in self.jobs.items() for index in range(len(addresses))]

    def training_tasks(self) -> list[TaskSpec]:
        """Returns the tasks that train synchronously: the chief and the workers."""
        return [task for task in self.tasks() if task.type != "ps"]

    def parameter_server_faults(self) -> Iterator[str]:
        """Yields an error that lists the jobs that training with parameter servers needs and the cluster lacks."""
        return parameter_server_faults(self.jobs)

    def address(self, task: TaskSpec) -> str:
        """Returns the `host:port` of a task."""
        return self.jobs[task.type][task.index]

    def to_tf_config(self, task: TaskSpec) -> str:
        """Returns the TF_CONFIG text for `task`.

        Raises:
            ConfigError: `task` is not in the cluster (an evaluator need not be).
        """
        faults = list(task_faults(task.type, task.index, self.jobs))
        if faults:
            raise ConfigError(faults)
        return json.dumps({"cluster": self.jobs, "task": dataclasses.asdict(task)})


class ClusterTask(NamedTuple):
    """A cluster, and the task of it that a process runs."""

    cluster: ClusterSpec
    task: TaskSpec


def from_tf_config(text: str) -> ClusterTask:
    """Reads a TF_CONFIG text.

    Args:
        text: JSON such as `{"cluster": {"worker": ["h0:2222", "h1:2222"]}, "task": {"type": "worker", "index": 0}}`.
            An evaluator job is accepted, but the cluster does not contain it.

    Returns:
        The cluster and this process's task in it.

    Raises:
        ConfigError: The text is invalid; the error lists every problem.

    Examples:
        >>> import tfdist.cluster
        >>> cluster, task = tfdist.cluster.from_tf_config(
        ...     '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 1}}'
        ... )
        >>> cluster.address(task)
        'host2:2222'
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"TF_CONFIG is not JSON: {e}. Received: {truncate(text)}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task'. Received: {truncate(text)}")
    if "sparseCluster" in config and "cluster" not in config:
        raise ConfigError(
            "TF_CONFIG has 'sparseCluster', which has only the addresses of the task and the servers (kubeflow/trainer#1763), "
            "but TensorFlow 2 needs the addresses of all tasks: leave enableDynamicWorker out of the TFJob. "
            f"Received: {truncate(text)}"
        )
    faults: list[str] = []
    jobs: dict[str, Any] = {}
    task: dict[str, Any] = {}
    for part, content, example in (
        ("cluster", jobs, '{"worker": ["host0:2222", "host1:2222"]}, with the addresses of all tasks'),
        ("task", task, '{"type": "worker", "index": 0}, with the index of this process'),
    ):
        if part not in config:
            faults.append(
                f"{part!r} is missing: add {example}. Received: {truncate(', '.join(map(repr, config))) or '{}'}"
            )
        elif not isinstance(config[part], dict) or not config[part]:
            faults.append(
                f"{part!r} must be an object such as {example}. Received: {truncate(json.dumps(config[part]))}"
            )
        else:
            content.update(config[part])
    member: TaskSpec | None = None
    if jobs:
        faults += cluster_faults(jobs)
        if jobs.get("ps") == []:
            faults += parameter_server_faults(jobs)
    if isinstance(task.get("type"), str) and is_index(task.get("index")):
        member = TaskSpec(task["type"], int(task["index"]))
        faults += task_faults(member.type, member.index, jobs)
    elif task:
        faults.append(
            "'task' must have a 'type' (a job's name) and an 'index' (a whole number from 0). "
            f"Received: {truncate(json.dumps(task))}"
        )
    if faults or member is None:
        raise ConfigError(f"TF_CONFIG: {fault}" for fault in faults)
    return ClusterTask(ClusterSpec({job: addresses for job, addresses in jobs.items() if job != "evaluator"}), member)


def check_member(cluster: Any) -> ClusterTask:
    """Validates the cluster and the task that a caller of tfdist passes, and returns them.

    Raises:
        ConfigError: `cluster` is not such a pair, or the cluster does not have the task.
    """
    kinds = [type(member) for member in cluster] if isinstance(cluster, (tuple, list)) else []
    if kinds != [ClusterSpec, TaskSpec]:
        raise ConfigError(
            "cluster must be a pair (ClusterSpec, TaskSpec), False for no cluster, or None for the environment's cluster. "
            f"Received: {format_value(cluster)}."
        )
    spec, task = cluster
    faults = list(task_faults(task.type, task.index, spec.jobs))
    if faults:
        raise ConfigError(faults)
    return ClusterTask(spec, task)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port`; an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
