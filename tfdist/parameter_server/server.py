"""What a worker or a parameter server does: serves TensorFlow's runtime until the chief has ended."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, greeting, preflight, reachability, silent_tasks
from tfdist.parameter_server import termination
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger
from tfdist.runtime.preemption import GRACE_SECONDS, Preemption

_POLL_SECONDS, _POLL_SECONDS_IF_PREEMPTED = 1.0, 0.2  # seconds
_MISSES = 3  # a chief that is busy may miss one


def serve(
    cluster: ClusterSpec,
    task: TaskSpec,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
) -> NoReturn:
    """Serves until the chief, once it was there, has gone; then leaves this process with the chief's exit code.

    TensorFlow's servers never end by themselves. SIGINT ends this one, too. On SIGTERM it serves until the chief has saved
    and gone, but for the grace at most. A parameter server, without which the others cannot go on, tells the chief. A chief that
    was killed says nothing: the exit code is then 75 after SIGTERM, and else 1, so that schedulers start this task again, too.

    Args:
        cluster: The cluster, which has a chief.
        task: This process's task.
        start_timeout: Seconds to wait for the chief, and later for one whose host does not answer.
        grace_seconds: How long the process may take to end after SIGTERM.

    Raises:
        ClusterError: The task's port is taken, or the chief has not been there in time.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    options = tf.compat.v1.ConfigProto()
    # A thread waits for each peer: with fewer they might wait for each other.
    options.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster.tasks()) + 1)
    addresses = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    with greeting.naming_port_owner(cluster, task):
        server = tf.distribute.Server(addresses, task.type, task.index, protocol="grpc", config=options)
    heard = Preemption(grace_seconds)
    heard.listen()
    logger.info(f"{task} serves at {cluster.address(task)}")
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout)
    preflight.wait_until_reachable(
        cluster, [cluster.chief], start_timeout, serving=True
    )  # it waits for the others itself
    heard.training = True
    misses, told = 0, False
    silent = silent_tasks.SilentTasks(cluster, task)
    while misses < _MISSES and max(silent.seconds.values(), default=0.0) < start_timeout:
        if heard.requested and not told:
            told = True
            if task.type == "ps":
                termination.announce_preemption(cluster, task)
        time.sleep(_POLL_SECONDS_IF_PREEMPTED if told else _POLL_SECONDS)
        reason = reachability.unreachable_reason(cluster.address(cluster.chief))
        misses = misses + 1 if reason in reachability.ENDED else 0
        silent.note({cluster.chief} if reason and not misses else ())
    code = termination.read_exit_code(cluster, task)
    if code is None:
        code = exit_status.PREEMPTED if heard.requested else 1
        logger.warning(f"{task} ends with exit code {code}, as the chief has gone without a word")
    else:
        logger.info(f"{task} ends with exit code {code}, as the chief has")
    del server
    os._exit(code)  # TensorFlow's server cannot be stopped
