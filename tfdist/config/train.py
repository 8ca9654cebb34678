"""`TrainConfig`: the complete configuration of `tfdist train`. No TensorFlow here.

Dataclasses with a default for every field. They are not frozen because flags assign to their fields (`--config.epochs=3`);
`tfdist.config.validation` checks the complete configuration before use.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from tfdist.config import callbacks as callbacks_lib
from tfdist.config import registry
from tfdist.config.backup import BackupConfig
from tfdist.config.cluster import ClusterConfig
from tfdist.config.compression import CompressionConfig
from tfdist.config.constraints import MOST_SECONDS, at_least, between, checked, choice, option, parsed
from tfdist.config.monitoring import MonitoringConfig
from tfdist.config.optimizer import OptimizerConfig
from tfdist.config.schedule import SCALINGS, ScheduleConfig
from tfdist.config.strategy import StrategyConfig
from tfdist.errors import ConfigError, describe_error, format_value
from tfdist.runtime.folders import storage

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
NAN_POLICIES = ("ignore", "stop", "skip")  # for a step whose loss or gradient is not finite


def _weights_faults(where: str, path: str) -> Iterator[str]:
    url_faults = list(storage.faults(where, path))
    yield from url_faults
    if path and not url_faults and not path.endswith((".weights.h5", ".keras")):
        yield f"{where} must be a file .weights.h5 or .keras. Received: {format_value(path)}."


@dataclasses.dataclass
class TrainConfig:
    """One training run.

    Attributes:
        task: The task to train: a name in `registry.TASKS` or of an installed task, or your own `package.module:Class` (see `tfdist.Task`).
        task_options: The task's options, an instance of its class `Options`.
        strategy: The `tf.distribute` strategy.
        cluster: The cluster, or the tasks to start on this machine if the environment describes no cluster.
        global_batch_size: Examples per step over all replicas. Either `global_batch_size` or `per_replica_batch_size` is set.
        per_replica_batch_size: Examples per step for each replica.
        epochs: Passes over the training data.
        steps_per_epoch: Steps per epoch; 0 means the number that the task's data has.
        validation_freq: Epochs from one validation to the next.
        callbacks: Keras' or your own callbacks, such as `"EarlyStopping(monitor=val_loss, patience=3); package.module:function"`.
        initial_weights: A `.weights.h5` or `.keras` file of this model; the training starts from its weights. Empty means no file.
        seed: Seed of the initial weights, the order of the data and the dropout masks.
        compression: The compression of gradients.
        deterministic: Use only TensorFlow operations whose results are bitwise reproducible, each on one thread unless TF_NUM_INTRAOP_THREADS
            is set, so that machines with different numbers of cores compute the same bits; slower.
        optimizer: The optimizer and its arguments.
        learning_rate: The learning rate.
        learning_rate_scaling: How the learning rate grows with the number of replicas: `"none"`, `"linear"` or `"sqrt"`.
        schedule: The schedule of the learning rate.
        precision: `"float32"`, `"mixed_bfloat16"` or `"mixed_float16"`, which compute in 16 bits and keep weights in 32.
        nan_policy: The action after a step whose loss or gradient is not finite: `"ignore"`, `"stop"` or `"skip"`.
        jit_compile: Compile each replica's computation with XLA.
        steps_per_execution: Steps per call from Python; callbacks run once per call.
        start_timeout: Seconds that a task waits for the other tasks at the start.
        grace_seconds: Seconds from a signal until a task is killed; the task saves within them.
        check_weights: Whether workers compare all weights after each epoch; otherwise only before and after the training.
        backup: The schedule and folder of backups.
        max_restarts: Number of restarts after failures of tasks, if this command starts the tasks.
        monitoring: The TensorBoard output.

    Examples:
        >>> import tfdist
        >>> config = tfdist.TrainConfig(task="digits", epochs=3)
        >>> config.optimizer.name = "sgd"
        >>> config.optimizer.momentum = 0.9
        >>> config.epochs
        3
    """

    task: str = "digits"
    task_options: Any = None
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    global_batch_size: int = option(0, *at_least(0))
    per_replica_batch_size: int = option(0, *at_least(0))
    epochs: int = option(1, *at_least(1))
    steps_per_epoch: int = option(0, *at_least(0))
    validation_freq: int = option(1, *at_least(1))
    callbacks: str = parsed("", lambda name, text: callbacks_lib.parse(text))
    initial_weights: str = checked("", _weights_faults)
    seed: int = option(0, *at_least(0))
    deterministic: bool = False
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    compression: CompressionConfig = dataclasses.field(default_factory=CompressionConfig)
    learning_rate: float = option(1e-3, *between(0, 1e6))
    learning_rate_scaling: str = choice("none", *SCALINGS)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    precision: str = choice("float32", *PRECISIONS)
    nan_policy: str = choice("ignore", *NAN_POLICIES)
    jit_compile: bool = False
    steps_per_execution: int = option(1, *at_least(1))
    start_timeout: float = option(300.0, *between(1, MOST_SECONDS))
    grace_seconds: float = option(25.0, *between(0, MOST_SECONDS))
    check_weights: bool = True
    backup: BackupConfig = dataclasses.field(default_factory=BackupConfig)
    max_restarts: int = option(0, *at_least(0))
    monitoring: MonitoringConfig = dataclasses.field(default_factory=MonitoringConfig)

    def __post_init__(self) -> None:
        # So that the task's options exist as fields that flags can set.
        if self.task_options is None and isinstance(self.task, str) and self.task in registry.TASKS:
            self.task_options = registry.resolve("task", self.task, registry.TASKS).Options()

    def choose_task(self, task: str) -> None:
        """Sets the task, and replaces the options of another task by this task's defaults.

        Raises:
            ConfigError: The task does not exist, or its options cannot be created.
        """
        options = getattr(registry.resolve("task", task, registry.TASKS), "Options", None)
        self.task = task
        if isinstance(options, type) and not isinstance(self.task_options, options):
            self.task_options = None  # another task's
            self.task_options = default_options(task, options)


def default_options(task: str, options: type) -> Any:
    """Returns the default options of a task, of the class `options`. Raises ConfigError if they cannot be created."""
    try:
        return options()
    except Exception as e:
        raise ConfigError(
            f"{options.__qualname__}() of task {task!r} raises {describe_error(e)}; give all its fields defaults."
        ) from e


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as plain values, for `config.json`."""
    return {**dataclasses.asdict(config), **{name: getattr(config, name).to_dict() for name in NAMED_OPTIONS}}


NAMED_OPTIONS = ("optimizer", "compression")  # groups with options

# Fields that must be equal on all tasks, because they determine the trained weights.
_SAME = (
    *("task", "task_options", "global_batch_size", "per_replica_batch_size", "steps_per_epoch", "steps_per_execution"),
    *("seed", "deterministic", "precision", "jit_compile"),
    *("strategy", "optimizer", "compression", "learning_rate", "learning_rate_scaling", "schedule"),
)

# The same for fields of the strategy; the others may differ.
_UPDATES_OF_STRATEGY = ("bucket_bytes", "weights_dtype", "row_updates", "gather_loss_bytes", "placement")
_SAME_OF_STRATEGY = ("name", "devices", "replicas", "shard_optimizer", *_UPDATES_OF_STRATEGY)


def fixed(config: TrainConfig) -> dict[str, Any]:
    """Returns the part of the configuration that must be equal on all tasks."""
    same = {name: value for name, value in to_dict(config).items() if name in _SAME}
    same |= {name: getattr(config, name).to_dict(complete=True) for name in NAMED_OPTIONS}
    same["strategy"] = {name: same["strategy"][name] for name in _SAME_OF_STRATEGY}
    return same


def resumable(config: TrainConfig) -> dict[str, Any]:
    """Returns the part of the configuration that must be equal in a resumed run, which may have another strategy and other devices."""
    same = fixed(config)
    updates = "asynchronous" if config.strategy.traits.asynchronous else "synchronous"
    strategy = {name: same["strategy"][name] for name in _UPDATES_OF_STRATEGY}
    same["strategy"] = {"updates": updates, **strategy}
    return same


def backup_arguments(config: TrainConfig, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the arguments of `BackupAndRestore` for `config`."""
    backup = dataclasses.asdict(config.backup)
    if backup["save_freq"] != "epoch":
        backup["save_freq"] = int(backup["save_freq"])
    return {
        "backup_dir": backup.pop("dir") or os.path.join(workdir, "backup"),
        **backup,
        "save_every_seconds": config.backup.save_every_seconds or None,
        "grace_seconds": config.grace_seconds,
        "config": {"config": resumable(config)},
    }
