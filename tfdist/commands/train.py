"""Trains the model of a preset or a config file: `tfdist train --config=digits --workdir=DIR`.

`python -m tfdist.train` is the same command.
With a cluster in the environment (TF_CONFIG) this process is one task of the cluster. Without a cluster,
`--config.cluster.workers=2` starts two tasks on this machine and watches them. Set fields of the configuration
as `--config.optimizer.momentum=0.9`. Exit code 0 means that the training has finished; 2, that the
configuration is invalid; 75, that the training has saved after SIGTERM: the same command resumes it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfdist.cluster import ClusterSpec, local_cluster, task_versions
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import ClusterTask
from tfdist.commands import summary_table
from tfdist.commands.finished_run import SOURCE, FinishedRun
from tfdist.compat import keras_backend
from tfdist.config import TrainConfig, validation
from tfdist.config import flags as flags_lib
from tfdist.config import train as config_lib
from tfdist.config.cluster import worker_range
from tfdist.errors import BackupError, ClusterError, ConfigError, DataError, collect_errors, format_value
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.launch.sizes import Sizes
from tfdist.launch.start import Host
from tfdist.ray.connection import ray_host
from tfdist.runtime import tensorflow_log
from tfdist.runtime.end import process_end
from tfdist.runtime.files import WriteError
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.log import logger, print_always
from tfdist.runtime.report import progress, stacks

if TYPE_CHECKING:
    import keras

    from tfdist.training.trainer import Trainer


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist train`; returns the exit code."""
    print_always()
    task_versions.script = __file__  # equal for `tfdist train` and `python -m tfdist.train`
    return process_end.run_command(_main, argv)


def _main(argv: Sequence[str]) -> int:
    tensorflow_log.set_level()
    faults: list[str] = []
    try:
        with collect_errors(faults):
            keras_backend.check()
        with collect_errors(faults):
            command = flags_lib.read(argv, __doc__)
            if command is None:  # --help
                return 0
            if validation.has_wrong_types(command.config, "cluster", "backup", "start_timeout", "epochs"):
                # Without the cluster, which depends on these fields.
                validation.check(command.config, 0, command.faults)
            resolved: ResolvedCluster | None = None
            workers: int | None = 0  # until the cluster is known to be valid
            with collect_errors(faults):
                resolved = _find_cluster(command.config)
                workers = None
                if resolved:
                    workers = len(resolved.cluster.training_tasks())
                _check_evaluator(command.config, resolved)
            if list(storage.faults("workdir", os.fspath(command.workdir))):  # without a connection
                validation.check(command.config, workers, command.faults)
            workdir = Workdir(command.workdir)
            finished = FinishedRun(command.config, workdir, command.overwrite)
            with collect_errors(faults):
                # An evaluator may evaluate a finished run's remaining backups.
                if not (resolved and resolved.task.type == "evaluator"):
                    finished.check()
            validation.check(command.config, workers, command.faults)
            if not faults:
                return _run(command.config, workdir, resolved, argv, finished)
    except (ClusterError, BackupError, DataError, WriteError, FloatingPointError) as e:
        logger.error(e)
        return 1
    for fault in faults:
        logger.error(fault)
    return process_end.FAULTY_CONFIG


def _find_cluster(config: TrainConfig) -> ResolvedCluster | None:
    arguments = config.cluster.resolver_arguments()
    arguments["source"] = os.environ.get(SOURCE, arguments["source"])
    return discovery.resolve(timeout=config.start_timeout, **arguments)


def _check_evaluator(config: TrainConfig, resolved: ResolvedCluster | None) -> None:
    if resolved and resolved.task.type == "evaluator":
        config.cluster.evaluator = 1  # so that the evaluator's requirements are checked, whatever the command line sets
    elif resolved and resolved.source != "tf_config" and config.cluster.evaluator:
        raise ConfigError(
            f"cluster.evaluator starts a process only if this command starts the tasks, but here {resolved.source} starts them; leave it at 0 "
            'and start another process, with TF_CONFIG whose task is {"type": "evaluator", "index": 0}.'
        )


def _run(
    config: TrainConfig,
    workdir: Workdir,
    resolved: ResolvedCluster | None,
    argv: Sequence[str],
    finished: FinishedRun,
) -> int:
    """Trains as a task of the resolved cluster, or alone, or starts the training tasks; returns the exit code."""
    if resolved is None:
        hint = discovery.misconfiguration_hint()
        if hint:
            logger.warning(f"training on this host alone, though {hint}.")
    if resolved or config.cluster.starts_tasks:
        workdir.check_shared()
    cluster = None
    if resolved is None and config.cluster.starts_tasks:
        cluster = local_cluster(worker_range(config.cluster.workers).most, config.cluster.ps)
        if not config.cluster.ray:
            discovery.check_gpus(cluster)
    is_owner = resolved is None or resolved.task == resolved.cluster.chief
    evaluator = ""
    if resolved and resolved.task.type == "evaluator":
        evaluator = resolved.task.name
    with workdir.claim(is_owner, evaluator):
        if is_owner and not evaluator:
            finished.replace()
        if cluster:
            return launch(config, cluster, argv, workdir)
        return _run_task(config, workdir, resolved, evaluator)


def _run_task(config: TrainConfig, workdir: Workdir, resolved: ResolvedCluster | None, evaluator: str) -> int:
    process_end.limit_interrupts()
    stacks.default_folder = os.path.abspath(workdir.logs / "logs")
    fields = {name: getattr(config, name) for name in ("epochs", "nan_policy", "callbacks", "initial_weights")}
    text = json.dumps({**config_lib.fixed(config), **fields}, default=str)
    task_versions.configuration = task_versions.checksum(text.encode())
    if config.backup.save_freq != "never" and threading.current_thread() is threading.main_thread():
        # The Trainer takes over some seconds later, once TensorFlow is loaded.
        signal.signal(signal.SIGTERM, process_end.end_at_once)
    if evaluator:
        _import_frameworks()
        importlib.import_module("tfdist.training.evaluator").evaluate_backups(config, workdir, evaluator)
        return 0
    cluster: ClusterTask | Literal[False] = False
    if resolved:
        cluster = resolved.apply()
    code = process_end.run_to_the_end(lambda: train(config, workdir, cluster=cluster))
    if not code and resolved:
        progress.write(finished=True)
    return code


def launch(config: TrainConfig, cluster: ClusterSpec, argv: Sequence[str], workdir: Workdir) -> int:
    """Starts this command again for each task of a cluster, on this machine or on Ray's nodes; returns the exit code."""
    logs = workdir.logs / "logs"
    if os.path.lexists(logs) and not logs.is_dir():
        raise ConfigError(
            f"{format_value(str(logs))} must be a folder for the tasks' output, and is a file: remove it, or choose another --workdir."
        )
    # The tasks get their cluster in TF_CONFIG, whatever the source is here.
    command = [sys.executable, "-m", "tfdist.train", *argv[1:]]
    workers = worker_range(config.cluster.workers)
    environ = {**os.environ, SOURCE: "tf_config", **workdir.for_tasks()}
    sizes = None
    if workers.is_elastic:
        sizes = Sizes(*workers, config.strategy.replicas, config.cluster.join_seconds)
    options = Options(
        command,
        cluster,
        logs,
        environ,
        grace_seconds=config.grace_seconds,
        max_restarts=config.max_restarts,
        evaluator=config.cluster.evaluator > 0,
        fresh_ports=True,
        must_finish=True,
        sizes=sizes,
        warm=config.cluster.warm > 0 and not config.cluster.ray,
    )
    host: Callable[..., Host] = Host
    if config.cluster.ray:
        host = ray_host(
            config.cluster.ray,
            config.cluster.ray_resources(),
            config.cluster.join_seconds,
            warm=config.cluster.warm > 0,
        )
    code = Launcher(options, host=host).run()
    if code == 0:
        summary_table.print_summary(workdir.read_json("summary.json") or {}, str(workdir))
    return code


def train(
    config: TrainConfig,
    workdir: Workdir,
    trainer: Trainer | None = None,
    cluster: ClusterTask | Literal[False] | None = None,
) -> dict[str, Any]:
    """Runs one task of a training and, on the chief, writes the run's files.

    Args:
        config: The configuration, checked by `validation.check`.
        workdir: The folder of `summary.json`, `config.json`, `model.keras` and `tensorboard/`.
        trainer: An existing trainer with its strategy. None creates a trainer from `config`.
        cluster: As for the `Trainer`.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: The configuration does not fit the available devices.
    """
    started = time.perf_counter()
    _import_frameworks()

    from tfdist.backup.callback import BackupAndRestore
    from tfdist.gradients.configured_optimizer import build_optimizer
    from tfdist.monitoring import goodput, network, summary, throughput
    from tfdist.training import configured, task_checks
    from tfdist.training.trainer import Trainer

    backup: BackupAndRestore | None = None
    configured.fix_threads(config)
    if trainer is None:
        options = {
            name: getattr(config, name) for name in ("compression", "start_timeout", "check_weights", "nan_policy")
        }
        if config.backup.save_freq != "never":
            backup = BackupAndRestore(**config_lib.backup_arguments(config, workdir))
        trainer = Trainer(config.strategy, cluster, backup=backup, **options)
    configured.prepare_process(config)

    asynchronous = config.strategy.traits.asynchronous  # each step runs on one worker
    in_sync = 1 if asynchronous else trainer.num_replicas
    batch_size = config.global_batch_size or config.per_replica_batch_size * in_sync
    validation.per_replica_batch_size(batch_size, in_sync)
    task = task_checks.make_task(config.task, config.task_options)
    steps = config.steps_per_epoch or task_checks.checked_steps(config.task, task.steps_per_epoch(batch_size))
    if steps == 0:
        raise ConfigError(f"global_batch_size {batch_size} is larger than the training data of task {config.task!r}.")
    trainer.print_replicas(batch_size)
    if trainer.is_chief:
        workdir.write_json("config.json", config_lib.to_dict(config))

    model = configured.build_model(trainer, config, task, lambda: build_optimizer(config, in_sync, steps))
    if not (backup and backup.resumes()):
        configured.load_initial_weights(config, trainer, model)

    goodput_file = workdir.logs / "goodput.bin" if trainer.is_chief else None
    results = summary.RunSummary(
        config,
        throughput.Throughput(batch_size),
        goodput.Goodput(goodput_file),
        trainer.cluster,
        trainer.num_replicas,
        trainer.strategy.transport or None,
        trainer.strategy.transport_reason or None,
        started,
    )
    callbacks: list[keras.callbacks.Callback] = [results.throughput, results.goodput]
    sent: network.WireBytes | None = None
    if trainer.cluster and not asynchronous:
        begins = 0
        if trainer.compression:
            begins = trainer.compression.start_step
        sent = network.WireBytes(trainer.cluster, trainer.task, begins=begins)
        callbacks.append(sent)
    callbacks += _callbacks(config, workdir, trainer, batch_size)

    def train_data(context: Any) -> Any:
        return task_checks.checked_data(config.task, "train_data", task.train_data(context, batch_size, config.seed))

    eval_data = task_checks.checked_data(config.task, "eval_data", task.eval_data(batch_size), is_validation=True)
    data: Any = train_data
    if trainer.strategy.batch_shares:
        import tensorflow as tf

        data = train_data(tf.distribute.InputContext())  # all workers read the batches of all
    results.history = trainer.fit(
        model,
        data,
        validation_data=eval_data,
        validation_freq=config.validation_freq,
        epochs=config.epochs,
        steps_per_epoch=steps,
        callbacks=callbacks,
    )
    configured.save_model(workdir, trainer, model)

    results.wire_bytes = summary.wire_bytes_per_step(model, trainer.compression, trainer.num_replicas, sent)
    results.counters = trainer.server_report(model)
    for feature in trainer.strategy.features:
        results.counters |= feature.summary(model, trainer.strategy.num_workers)
    epochs = len(results.history.epoch)
    if epochs < config.epochs and model.stop_training:
        stopped = [type(callback).__name__ for callback in callbacks if getattr(callback, "stopped_epoch", 0)]
        results.counters["ended_early"] = (
            f"{epochs} of {config.epochs} epochs ({', '.join(stopped) or 'stop_training'})"
        )
    report = results.to_dict()
    if trainer.is_chief:
        report["training"] = ""
        if backup:
            report["training"] = backup.training_id
        report = _write_summary(workdir, report, is_resumable=backup is not None)
    trainer.on_model_saved(model)  # after all files are written
    results.goodput.delete()
    return report


def _callbacks(
    config: TrainConfig, workdir: Workdir, trainer: Trainer, batch_size: int
) -> list[keras.callbacks.Callback]:
    """Creates the callbacks that write files."""
    import keras

    from tfdist.monitoring import tensorboard, tracker
    from tfdist.training import configured

    options = {**config.monitoring.arguments(), "hparams": config_lib.to_dict(config)}
    callbacks = [tensorboard.TensorBoard(workdir.logs / "tensorboard", global_batch_size=batch_size, **options)]
    if config.monitoring.tracker:
        callbacks.append(tracker.Tracker(config.monitoring.tracker, config_lib.to_dict(config)))
    callbacks += configured.build_callbacks(config, trainer.is_chief, workdir)
    if workdir.is_url:
        uploads = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: workdir.upload())
        uploads.only_observes = True
        callbacks.append(uploads)  # after those that write
    return callbacks


def _write_summary(workdir: Workdir, summary: dict[str, Any], is_resumable: bool) -> dict[str, Any]:
    """Writes `summary.json`, and prints it unless the launcher does; returns its content."""
    before = workdir.read_json("summary.json") or {}
    if is_resumable and all(before.get(name) == summary[name] for name in ("training", "steps")):
        # The previous process was killed after the training: this one has no measurements.
        summary = {**before, "restarts": summary["restarts"]}
    workdir.write_json("summary.json", summary)
    if SOURCE not in os.environ:
        summary_table.print_summary(summary, str(workdir))
    return summary


def _import_frameworks() -> None:
    """Imports TensorFlow and Keras without the garbage collector, which would take a second and free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with tensorflow_log.filtered():
            importlib.import_module("tfdist.training.trainer")
    finally:
        if enabled:
            gc.enable()
    gc.freeze()  # later collections skip these objects, too


if __name__ == "__main__":
    process_end.after_imports()
    exit_code = main(sys.argv)
    if "tensorflow" in sys.modules:
        process_end.leave(exit_code)
    sys.exit(exit_code)
