"""The hardware that decides how a process's sums are rounded: its threads, and the kind of its processor or GPUs.

TensorFlow splits the sum of a large tensor, and the long axis of a matrix product, into one part per thread. So the norm of the
same gradient differs in its last bit between processes with different hardware.
"""

from __future__ import annotations

import os
import pathlib
import platform
import zlib

import numpy as np
import tensorflow as tf

from tfdist.strategy import as_ours

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
STAND_IN = "TFDIST_CPUS_AS_GPUS"  # set by tests, in which the CPUs of workers stand in for GPUs


def on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas of a strategy of workers are on GPUs."""
    return "GPU" in strategy.extended.worker_devices[0] or bool(os.environ.get(STAND_IN))


def intra_op_threads() -> int:
    """Returns the number of threads that compute one TensorFlow operation on this process's CPU."""
    configured = tf.config.threading.get_intra_op_parallelism_threads()
    if configured:
        return configured
    named = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    if named.isdigit() and int(named):
        return int(named)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name(devices: tuple[str, ...]) -> str:
    """Returns the names of the GPUs among the devices that compute the replicas, else the CPU's threads and name."""
    if any("GPU" in device for device in devices):
        gpus = tf.config.list_physical_devices("GPU")
        return ", ".join(str(tf.config.experimental.get_device_details(gpu).get("device_name")) for gpu in gpus)
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{intra_op_threads()} threads of {name}"


def unlike_processors(strategy: tf.distribute.MultiWorkerMirroredStrategy, workers: int) -> tuple[int, ...]:
    """Returns each worker's number of threads if the workers' processors differ, else `()`. A collective."""
    processor = processor_name(strategy.extended.worker_devices)
    replicas = strategy.num_replicas_in_sync // workers

    def own_row(context: tf.distribute.ValueContext) -> tf.Tensor:
        worker, replica = divmod(context.replica_id_in_sync_group, replicas)
        row = np.zeros((workers, 2))
        if replica == 0:
            row[worker] = zlib.crc32(processor.encode()), intra_op_threads()
        return tf.constant(row)

    kinds = strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(own_row), axis=None).numpy()
    differ = len({number for number, _ in kinds}) > 1
    return tuple(int(count) for _, count in kinds) if differ else ()


def describe_difference(strategy: tf.distribute.Strategy) -> str:
    """Returns the difference between the workers' processors as a phrase; empty if they are equal or there is one worker."""
    ours = as_ours(strategy)
    counts = ours.unlike_processors if ours else ()
    if len(set(counts)) > 1:
        return f"threads ({', '.join(map(str, counts))})"
    return "kinds of processors" if counts else ""
