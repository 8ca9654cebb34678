"""`Options`: a user's choices for a job and its tasks. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import psutil

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.launch.sizes import Sizes
from tfdist.runtime import tensorflow_log
from tfdist.runtime.folders.claim import JOB, this_run
from tfdist.runtime.report import progress, stacks


@dataclasses.dataclass(frozen=True)
class Options:
    """The command of a job, its cluster, and the rules for its starts.

    Args:
        command: The command and its arguments, the same for all tasks.
        cluster: The tasks and their addresses.
        log_dir: The folder of each task's output, `<task>.log`. Logs of an earlier run move to its subfolder `before`.
        environ: The environment that tasks inherit. None means this process's.
        grace_seconds: Seconds from SIGTERM to SIGKILL. TensorFlow may wait for a peer and not react to SIGTERM.
        max_restarts: Number of restarts after failures; 0 means that the first failure ends the job.
        prefixes: Words before a task's command, by task. They run the command, such as `nsenter`.
        evaluator: Whether to run the command as the task `evaluator:0`, too: outside the cluster, and without GPUs.
        fresh_ports: Whether to choose new ports when all tasks restart. Only for a cluster of this machine whose ports tfdist has chosen.
        must_finish: Whether exit code 0 is a failure of a task that has not reported `finished` (`progress.Progress`). During a `fit` it always is.
        here: The tasks to start on this machine; launchers on other machines start and restart the others. None means all.
        sizes: The number of workers of an elastic job, which continues with fewer workers after one was killed, and with more after
            a backup. Only for synchronous workers of this machine. None means always as many as `cluster` has.
        warm: Whether to fork tasks from a process that has imported TensorFlow and Keras, where that is possible (`WarmSpare`).
        stdin: The task that reads this process's standard input. None means that no task reads it.

    Examples:
        >>> from tfdist.cluster import local_cluster
        >>> from tfdist.launch import Options
        >>> options = Options(["python", "script.py"], local_cluster(2), "logs", max_restarts=3)
        >>> [str(task) for task in options.cluster.tasks()]
        ['worker:0', 'worker:1']
    """

    command: Sequence[str]
    cluster: ClusterSpec
    log_dir: str | os.PathLike[str]
    environ: Mapping[str, str] | None = None
    grace_seconds: float = 25.0
    max_restarts: int = 0
    prefixes: Mapping[TaskSpec, Sequence[str]] = dataclasses.field(default_factory=dict)
    evaluator: bool = False
    fresh_ports: bool = False
    must_finish: bool = False
    here: Sequence[TaskSpec] | None = None
    sizes: Sizes | None = None
    warm: bool = False
    stdin: TaskSpec | None = None

    def task_environ(self, cluster: ClusterSpec, task: TaskSpec, folder: str) -> dict[str, str]:
        """Returns the environment of a task; `folder` is that in which tasks write their progress."""
        variables = {tensorflow_log.LEVEL: tensorflow_log.ERRORS_ONLY}
        variables |= os.environ if self.environ is None else self.environ
        variables |= {"TF_CONFIG": cluster.to_tf_config(task), "PYTHONUNBUFFERED": "1"}
        variables |= {progress.FOLDER: folder, progress.TASK: task.name}
        variables[JOB] = this_run()
        variables[stacks.FOLDER] = os.path.abspath(self.log_dir)
        variables[progress.LAUNCHED] = str(psutil.Process().create_time())
        if self.sizes:
            variables[progress.REPLICAS] = str(self.sizes.replicas)
        # The cluster's tasks reserve all memory of the GPUs, so the evaluator gets none.
        if task.type == "evaluator":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables
