"""The start of a `Trainer`: finds the cluster, creates the strategy, and determines which tasks train together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.backup.callback import BackupAndRestore
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.spec import check_member
from tfdist.collectives import ranks
from tfdist.compression.base import Compressor
from tfdist.config import StrategyConfig
from tfdist.config.constraints import MOST_SECONDS, between
from tfdist.errors import ConfigError, format_value
from tfdist.runtime.end.process_end import GRACE_SECONDS
from tfdist.runtime.report import stacks
from tfdist.strategies import mesh
from tfdist.strategies.factory import create_strategy, make_engine
from tfdist.strategy import Strategy
from tfdist.training import checks, hangs, keras_distribution
from tfdist.training.loop_context import LoopContext

Cluster = tuple[ClusterSpec, TaskSpec]
_TIMEOUT, _is_timeout = between(0, MOST_SECONDS)


def start_strategy(
    strategy: str | StrategyConfig | tf.distribute.Strategy | None,
    distribution: Any,
    cluster: Cluster | Literal[False] | None,
    backup: BackupAndRestore | None,
    start_timeout: float,
    options: Mapping[str, Any],
) -> tuple[Strategy, Cluster | None]:
    """Returns the strategy, connected with the other tasks, and the cluster with this task, or None without a cluster.

    Takes the arguments of `Trainer`, and the value of `keras.distribution.distribution()`. Handles SIGTERM from here on. Raises ClusterError if other tasks do not start in time.
    """
    if backup is not None and not isinstance(backup, BackupAndRestore):
        raise ConfigError(f"backup must be a tfdist.BackupAndRestore. Received: {format_value(backup)}.")
    if cluster is not None and cluster is not False:
        cluster = check_member(cluster)
    if isinstance(start_timeout, bool) or not isinstance(start_timeout, (int, float)) or not _is_timeout(start_timeout):
        raise ConfigError(
            f"start_timeout must be a number of seconds, {_TIMEOUT}. Received: {format_value(start_timeout)}."
        )
    preemption = backup.preemption if backup else None
    if preemption:
        preemption.listen()  # from now on: a strategy may wait for its peers
    cluster_and_task = cluster or None
    if cluster is None:
        cluster_and_task = discovery.find_cluster(timeout=start_timeout)
    task: TaskSpec | None = None
    has_peers = False
    if cluster_and_task:
        spec, task = cluster_and_task
        has_peers = task.type != "evaluator" and len(spec.training_tasks()) > 1
    listen(task)
    chosen, options = keras_distribution.choose_strategy(distribution, strategy, options, has_peers)
    created: Any = chosen
    if isinstance(chosen, tf.distribute.Strategy):
        checks.check_strategy(chosen, options)
    else:
        grace = preemption.grace_seconds if preemption else GRACE_SECONDS
        created = create_strategy(chosen, cluster_and_task or False, start_timeout, grace, **options)
        if isinstance(distribution, keras.distribution.ModelParallel):
            created = mesh.split(created, distribution)
            created.engine = make_engine(created)
    if preemption:
        preemption.listen()  # TensorFlow has replaced the handler
    return created, cluster_and_task


def listen(task: TaskSpec | None) -> None:
    """Makes this task answer `tfdist stacks`; a process that is no task of a cluster does so if it has a log folder."""
    if task is None and (not stacks.folder() or "TF_CONFIG" in os.environ):
        return
    stacks.listen(task.name if task else "worker-0")


def create_context(
    strategy: Strategy,
    cluster_and_task: Cluster | None,
    backup: BackupAndRestore | None,
    compressor: Compressor | None,
    check_weights: bool,
) -> LoopContext:
    """Returns the context of the trainer's loops: the tasks that train together, and the strategy's engine.

    Restores the seed of the chief's backup on all tasks, because hosts without a shared folder have no backup. Raises ConfigError if the strategy trains in one process, but the cluster has several training tasks.
    """
    if check_weights not in (True, False):
        raise ConfigError(f"check_weights must be True or False. Received: {format_value(check_weights)}.")
    traits = strategy.traits
    engine = make_engine(strategy, compressor)
    if backup and backup.preemption:
        backup.preemption.on_exit = engine.on_exit
    if strategy.cluster:  # of parameter servers, for which this process is the chief
        cluster_and_task = (strategy.cluster, strategy.cluster.chief)
    elif not traits.several_processes:
        checks.check_trains_alone(cluster_and_task, type(strategy).__name__)
        cluster_and_task = None
    cluster, task = cluster_and_task or (None, TaskSpec("worker", 0))
    tasks = cluster.training_tasks() if cluster and traits.several_processes else [task]
    if cluster and traits.several_processes and len(tasks) > 1:
        hangs.start_watch(cluster, task, strategy.config.timeout_seconds)
    together = ranks.Ranks(strategy, tasks.index(task), list(map(str, tasks)))
    if strategy.mesh:
        together = strategy.mesh.everyone
    engine.ranks = together
    seed = str(backup.saved_seed()) if backup else ""
    seed = together.gather_texts(seed)[0]  # a collective, also of tasks without a backup
    if backup:
        backup.restore_seed(seed)
    return LoopContext(strategy, engine, together, cluster, task, backup, check_weights)
