"""`run`: calls a function on the nodes of a Ray cluster, as `tfdist launch --ray` runs a program. No TensorFlow here."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from tfdist.cluster import local_cluster
from tfdist.config.cluster import worker_range
from tfdist.errors import ClusterError
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.launch.sizes import JOIN_SECONDS, Sizes
from tfdist.ray.connection import ray_host
from tfdist.runtime.end import process_end

_Value = TypeVar("_Value")


def run(
    train: Callable[[], _Value],
    workers: int | tuple[int, int] = 1,
    *,
    address: str = "auto",
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    max_restarts: int = 0,
    join_seconds: float = JOIN_SECONDS,
    warm: bool = True,
    log_dir: str | os.PathLike[str] = "logs",
) -> _Value:
    """Calls a function once on each worker of a job on a Ray cluster, and returns the return value of worker 0.

    The workers' output appears here, after the worker's name. Ray pickles the function with the variables that it uses; modules that it
    imports must exist on the nodes. After a restart the function is called again, so it must resume from a backup (`backup_dir`). The caller
    stays connected to the cluster.

    Args:
        train: The function, without arguments (`functools.partial` binds them). It creates the Trainer, as a script does.
        workers: The number of workers, or the smallest and the largest number of an elastic job.
        address: The address of the cluster, such as `"HOST:6379"`; `"auto"` means the cluster to which this process is connected, or
            that of the environment.
        cpus_per_worker: CPUs that each worker takes from the cluster.
        gpus_per_worker: GPUs that each worker takes from the cluster.
        max_restarts: Number of restarts after failures.
        join_seconds: Seconds for which a start waits for nodes; for an elastic job, also seconds after a loss in which it starts again
            with as many workers, while restarts are left.
        warm: Whether to fork the workers from a process that has imported TensorFlow. Set it to False for a function that sets
            environment variables of TensorFlow or Keras.
        log_dir: The folder of each worker's output.

    Returns:
        The return value of the function on worker 0.

    Raises:
        ConfigError: An argument is invalid, or Ray is not installed.
        ClusterError: There is no such cluster, it has no place for the workers, or a worker failed. The error's note is the worker's traceback.
        KeyboardInterrupt: After Ctrl-C, once all workers have ended.
        SystemExit: After SIGTERM, with the exit code of `tfdist launch`.

    Examples:
        >>> import tfdist
        >>> def train():
        ...     trainer = tfdist.Trainer("multi_worker_mirrored", backup_dir="s3://bucket/backup")
        ...     # ... build, compile and fit a model in its scope
        ...     return trainer.num_replicas
        >>> # replicas = tfdist.ray.run(train, workers=(2, 8), max_restarts=3)
    """
    span = workers if isinstance(workers, int) else ":".join(map(str, workers))
    size = worker_range(span, "workers")
    sizes = None
    if size.is_elastic:
        sizes = Sizes(*size, join_seconds=join_seconds)
    resources = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
    new_host = ray_host(address, resources, join_seconds, warm)
    outcomes: dict[str, bytes] = {}
    host = functools.partial(new_host, function=_pickle(train), on_outcome=outcomes.__setitem__)
    command = [sys.executable, "-m", "tfdist.ray.task"]
    options = Options(command, local_cluster(size.most), log_dir, max_restarts=max_restarts, sizes=sizes)
    launcher = Launcher(options, host=host)
    code = launcher.run()
    if launcher.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    if launcher.signals:
        raise SystemExit(code)
    if launcher.failure:
        name = launcher.failure.task.name
        error = ClusterError(f"{launcher.failure}. Read its output in {os.path.join(log_dir, name)}.log")
        if outcomes.get(name):  # a killed worker has no traceback
            error.add_note(outcomes[name].decode())
        raise error
    if code == process_end.PREEMPTED:
        raise ClusterError(
            "a worker has ended after SIGTERM. Call the function again to continue from the last backup, or set max_restarts"
        )
    if not outcomes.get("worker-0"):
        raise ClusterError(
            "worker:0 has ended before its function has returned. Return from the function; do not call sys.exit"
        )
    value: _Value = pickle.loads(outcomes["worker-0"])
    return value


def _pickle(train: Callable[[], object]) -> bytes:
    from ray import cloudpickle

    return pickle.dumps([os.path.abspath(entry) for entry in sys.path]) + cloudpickle.dumps(train)
