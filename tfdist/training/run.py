"""`run`: a configuration's training from its checks to `summary.json`, as a call. `tfdist train` is this call in a process of its own."""

from __future__ import annotations

import os
from typing import Any, Literal

import tensorflow as tf

from tfdist.backup.callback import BackupAndRestore
from tfdist.cluster import task_versions
from tfdist.cluster.spec import ClusterTask
from tfdist.config import TrainConfig, validation, walk
from tfdist.config import train as config_lib
from tfdist.errors import ConfigError
from tfdist.gradients.configured_optimizer import build_optimizer
from tfdist.runtime.folders import storage
from tfdist.runtime.report import stacks
from tfdist.training import configured, evaluator, task_checks
from tfdist.training.prepared_run import PreparedRun
from tfdist.training.summary import RunSummary
from tfdist.training.trainer import Trainer


def run(
    config: TrainConfig, workdir: str | os.PathLike[str], overwrite: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Trains a configuration in this process, as each task of `tfdist train` does, and writes the run's files.

    The process is the task that TF_CONFIG or a scheduler describes, else it trains alone; `tfdist launch` starts a script as several tasks.
    After an interruption the same call continues from the last backup.

    Args:
        config: The configuration. Whole numbers in its fields of floats become floats.
        workdir: A folder that all tasks share, or its URL.
        overwrite: Whether to train again in the folder of a finished run, whose results are replaced at the end.
        **arguments: Further arguments of `fit`, such as `verbose=0` or `class_weight`; `callbacks` come after those of the configuration.

    Returns:
        The content of `summary.json`; empty in an evaluator, which evaluates the backups of the other tasks.

    Raises:
        ConfigError: The configuration, the cluster or the folder is invalid; the error lists every problem.
        ClusterError: A task is lost that the others need.

    Examples:
        >>> import tempfile, tfdist
        >>> config = tfdist.TrainConfig("digits", global_batch_size=64, steps_per_epoch=2, epochs=2)
        >>> summary = tfdist.run(config, tempfile.mkdtemp(), verbose=0)
        >>> summary["steps"]
        4
    """
    walk.make_floats(config)
    prepared = PreparedRun(config, workdir, overwrite, list(storage.faults("workdir", os.fspath(workdir))))
    if prepared.starts_tasks:
        raise ConfigError(
            f"cluster.workers={config.cluster.workers}, cluster.ps={config.cluster.ps} and cluster.evaluator={config.cluster.evaluator} start "
            "tasks with `tfdist train` only. Start the script with `tfdist launch --workers=N -- python SCRIPT`, or leave them at their defaults."
        )
    with prepared.claim():
        return train(prepared, **arguments)


def train(prepared: PreparedRun, trainer: Trainer | None = None, **arguments: Any) -> dict[str, Any]:
    """Trains as one task of a run, in its claimed work directory; None creates the trainer of the configuration. Returns the same as `run`."""
    config, workdir = prepared.config, prepared.workdir
    stacks.default_folder = os.path.abspath(workdir.logs / "logs")
    if prepared.evaluator:
        evaluator.evaluate_backups(config, workdir, prepared.evaluator)
        return {}
    trainer = trainer or _make_trainer(prepared)
    configured.prepare_process(config)
    task = task_checks.make_task(config.task, config.task_options)
    replicas = 1 if config.strategy.traits.asynchronous else trainer.num_replicas  # each step runs on one worker
    batch_size = config.global_batch_size or config.per_replica_batch_size * replicas
    validation.per_replica_batch_size(batch_size, replicas)
    steps = config.steps_per_epoch or task_checks.checked_steps(config.task, task.steps_per_epoch(batch_size))
    if steps == 0:
        raise ConfigError(f"global_batch_size {batch_size} is larger than the training data of task {config.task!r}.")
    if arguments.get("verbose") != 0:
        trainer.print_replicas(batch_size)
    if trainer.is_chief:
        workdir.write_json("config.json", config_lib.to_dict(config))

    model = configured.build_model(trainer, config, task, lambda: build_optimizer(config, replicas, steps))
    if not (trainer.backup and trainer.backup.resumes()):
        configured.load_initial_weights(config, trainer, model)
    summary = RunSummary(config, trainer, batch_size, workdir.logs, prepared.started)
    observers = configured.observers(config, trainer.is_chief, workdir, batch_size)
    callbacks = [*summary.callbacks, *observers, *arguments.pop("callbacks", ())]
    train_data, eval_data = _make_data(config, trainer, task, batch_size)
    history = trainer.fit(
        model,
        train_data,
        validation_data=eval_data,
        validation_freq=config.validation_freq,
        epochs=config.epochs,
        steps_per_epoch=steps,
        callbacks=callbacks,
        **arguments,
    )
    configured.save_model(workdir, trainer, model)
    report = summary.report(model, history, callbacks)
    if trainer.is_chief:
        before = workdir.read_json("summary.json") or {}
        if trainer.backup and all(before.get(name) == report[name] for name in ("training", "steps")):
            # The previous process was killed after the training: this one has no measurements.
            report = {**before, "restarts": report["restarts"]}
        workdir.write_json("summary.json", report)
    trainer.on_model_saved(model)  # after all files are written
    summary.goodput.delete()
    return report


def _make_trainer(prepared: PreparedRun) -> Trainer:
    config = prepared.config
    task_versions.configuration = configured.checksum(config)
    configured.fix_threads(config)
    backup: BackupAndRestore | None = None
    if config.backup.save_freq != "never":
        backup = BackupAndRestore(**config_lib.backup_arguments(config, prepared.workdir))
    names = ("compression", "start_timeout", "check_weights", "nan_policy")
    options = {name: getattr(config, name) for name in names}
    cluster: ClusterTask | Literal[False] = prepared.resolved.apply() if prepared.resolved else False
    return Trainer(config.strategy, cluster, backup=backup, **options)


def _make_data(config: TrainConfig, trainer: Trainer, task: Any, batch_size: int) -> tuple[Any, Any]:
    """Returns the task's data for `fit`: of the training, and of the validation."""

    def train_data(context: Any) -> Any:
        return task_checks.checked_data(config.task, "train_data", task.train_data(context, batch_size, config.seed))

    eval_data = task_checks.checked_data(config.task, "eval_data", task.eval_data(batch_size), is_validation=True)
    if trainer.strategy.batch_shares:  # all workers read the batches of all
        return train_data(tf.distribute.InputContext()), eval_data
    return train_data, eval_data
