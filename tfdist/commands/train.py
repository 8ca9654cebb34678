"""Trains the model of a preset or a config file: `tfdist train --config=digits --workdir=DIR`.

`python -m tfdist.train` is the same command.
With a cluster in the environment (TF_CONFIG) this process is one task of it. Without one, and with
`--config.cluster.workers=2`, it starts that many tasks on this machine and watches them. Fields of the configuration
are set as `--config.optimizer.momentum=0.9`. Exit code 0 means that the training has finished; 2, that the
configuration is faulty; 75, that it received SIGTERM and has saved, and the same command resumes from there.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tfdist.runtime import interrupt

if __name__ == "__main__":
    interrupt.before_imports()

from tfdist.cluster import task_versions
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import ClusterTask
from tfdist.compat import keras_backend
from tfdist.config import TrainConfig, registry, validation
from tfdist.config import flags as flags_lib
from tfdist.config import train as config_lib
from tfdist.errors import BackupError, ClusterError, ConfigError, collect_errors, format_value
from tfdist.launch import network_namespaces
from tfdist.launch.launcher import Launcher
from tfdist.runtime import exit_status, preemption
from tfdist.runtime.files import WriteError
from tfdist.runtime.goodput import during
from tfdist.runtime.log import logger, print_always

if TYPE_CHECKING:
    from tfdist.training.trainer import Trainer

_CLOCK_SECONDS = 60  # by which the clock of a file server may be behind
_SOURCE = "TFDIST_SOURCE"  # the cluster's source, for the tasks that this command starts


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist train`; returns the exit code."""
    print_always()
    task_versions.script = __file__  # the same, whichever way the command was started
    try:
        exit_status.exit_code = _main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error(interrupt.MESSAGE)
        exit_status.exit_code = 128 + signal.SIGINT
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_status.exit_code = 128 + signal.SIGPIPE
    return exit_status.exit_code


def _main(argv: Sequence[str]) -> int:
    # TensorFlow's C++ log: errors only. Read when TensorFlow is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    faults: list[str] = []
    try:
        with collect_errors(faults):
            keras_backend.check()
        with collect_errors(faults):
            command = flags_lib.read(argv, __doc__)
            if command is None:  # --help
                return 0
            found: ResolvedCluster | None = None
            workers: int | None = 0  # unless the cluster is sound
            with collect_errors(faults):
                found = _find_cluster(command.config)
                workers = len(found.cluster.training_tasks()) if found else None
                _check_evaluator(command.config, found)
            validation.check(command.config, workers, command.faults)
            if not faults:
                return _run(command.config, command.workdir, found, argv)
    except (ClusterError, BackupError, WriteError, FloatingPointError) as e:
        logger.error(e)
        return 1
    except SystemExit as e:
        if e.code not in (0, None):
            raise
        *_, frame = traceback.extract_tb(e.__traceback__)
        logger.error(
            f"sys.exit({e.code or ''}) was called before the results were written ({frame.filename}:{frame.lineno}). To end the training "
            "and write them, set model.stop_training = True in a callback; to fail, raise an error."
        )
        return 1
    for fault in faults:
        logger.error(fault)
    return exit_status.FAULTY_CONFIG


def _find_cluster(config: TrainConfig) -> ResolvedCluster | None:
    arguments = config.cluster.resolver_arguments()
    arguments["source"] = os.environ.get(_SOURCE, arguments["source"])
    return discovery.resolve(timeout=config.start_timeout, **arguments)


def _check_evaluator(config: TrainConfig, found: ResolvedCluster | None) -> None:
    if found and found.task.type == "evaluator":
        config.cluster.evaluator = 1  # whose needs are checked, whatever the command line says
    elif found and found.source != "tf_config" and config.cluster.evaluator:
        raise ConfigError(
            f"cluster.evaluator starts a process where this command starts the others, but here {found.source} does; leave it at 0 "
            'and start one process more, with TF_CONFIG whose task is {"type": "evaluator", "index": 0}.'
        )


def _run(config: TrainConfig, workdir: pathlib.Path, found: ResolvedCluster | None, argv: Sequence[str]) -> int:
    """Trains as a task of the cluster that was found, or alone, or starts the tasks that train; returns the exit code."""
    if found is None and (hint := discovery.misconfiguration_hint()):
        logger.warning(f"training on this host alone, though {hint}.")
    evaluates = found is not None and found.task.type == "evaluator"
    if found is None or evaluates or found.task == found.cluster.chief:
        make_workdir(workdir)
    if found is None and (config.cluster.workers > 1 or config.cluster.ps > 0 or config.cluster.evaluator > 0):
        return launch(config, argv, workdir)
    interrupt.listen()
    fields = {name: getattr(config, name) for name in ("epochs", "nan_policy", "callbacks", "initial_weights")}
    text = json.dumps({**config_lib.fixed(config), **fields}, default=str)
    task_versions.configuration = task_versions.checksum(text.encode())
    if config.backup.save_freq != "never" and threading.current_thread() is threading.main_thread():
        # The Trainer takes over some seconds later, once TensorFlow is loaded.
        signal.signal(signal.SIGTERM, preemption.end_at_once)
    if found and evaluates:
        _import_frameworks()
        importlib.import_module("tfdist.training.evaluator").evaluate_backups(config, workdir, found.task.name)
    else:
        train(config, workdir, cluster=found.apply() if found else False)
    return 0


def make_workdir(workdir: pathlib.Path) -> None:
    """Makes the work directory.

    Raises:
        ConfigError: The folder cannot be made, or nothing can be written to it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"workdir must be a folder that can be written to. Received: {format_value(str(workdir))} ({why})."
        ) from None


def launch(config: TrainConfig, argv: Sequence[str], workdir: pathlib.Path) -> int:
    """Runs this same command as every task of a cluster on this machine; returns the exit code."""
    if os.path.lexists(logs := workdir / "logs") and not logs.is_dir():
        raise ConfigError(
            f"{format_value(str(logs))} must be a folder for the tasks' output, and is a file: remove it, or choose another --workdir."
        )
    # The tasks are told of their cluster in TF_CONFIG, whoever was to be asked here.
    command = [sys.executable, "-m", "tfdist.train", *argv[1:]]
    netns = os.environ.get(network_namespaces.VARIABLE, "")
    cluster, prefixes = network_namespaces.assign_namespaces(config.cluster.workers, config.cluster.ps, netns)
    environ = {**os.environ, _SOURCE: "tf_config"}
    limits: dict[str, Any] = {"grace_seconds": config.grace_seconds, "max_restarts": config.max_restarts}
    limits |= {"evaluator": config.cluster.evaluator > 0, "fresh_ports": True}
    began = time.time()
    code = Launcher(command, cluster, logs, environ, prefixes=prefixes, **limits).run()
    summary = workdir / "summary.json"
    if code == 0 and not (summary.exists() and summary.stat().st_mtime >= began - _CLOCK_SECONDS):
        logger.error(
            f"all tasks ended with exit code 0, and none has written {format_value(str(summary))}: the task or a callback ends the "
            "process (os._exit). Their output is in the folder logs."
        )
        return 1
    return code


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    trainer: Trainer | None = None,
    cluster: ClusterTask | Literal[False] | None = None,
) -> dict[str, Any]:
    """Runs one task of a training and, on the chief, writes the run's files.

    Args:
        config: What to train, checked by `validation.check`.
        workdir: Where `summary.json`, `config.json`, `model.keras` and `tensorboard/` go.
        trainer: An existing trainer to use, with a strategy of its own. None means one made from `config`.
        cluster: As for the `Trainer`.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: The configuration does not fit the devices found.
    """
    started = time.perf_counter()
    _import_frameworks()
    import keras

    from tfdist.backup.callback import BackupAndRestore
    from tfdist.gradients.configured_optimizer import build_optimizer
    from tfdist.gradients.optimizer import skipped_updates
    from tfdist.monitoring import goodput as goodput_lib
    from tfdist.monitoring import network, summary_table, tensorboard
    from tfdist.monitoring import summary as summary_lib
    from tfdist.monitoring import throughput as throughput_lib
    from tfdist.training import configured, export_best, task_checks
    from tfdist.training.trainer import Trainer

    workdir = pathlib.Path(workdir)
    backup: BackupAndRestore | None = None
    if trainer is None:
        options = {
            name: getattr(config, name) for name in ("compression", "start_timeout", "check_weights", "nan_policy")
        }
        saves = config.backup.save_freq != "never"
        backup = BackupAndRestore(**config_lib.backup_arguments(config, workdir)) if saves else None
        trainer = Trainer(config.strategy, cluster, backup=backup, **options)
    configured.prepare_process(config)

    replicas = trainer.num_replicas
    asynchronous = config.strategy.traits.asynchronous  # a step is one worker's
    in_sync = 1 if asynchronous else replicas
    batch_size = config.global_batch_size or config.per_replica_batch_size * in_sync
    validation.per_replica_batch_size(batch_size, in_sync)
    task = registry.resolve("task", config.task, registry.TASKS)(config.task_options)
    steps = config.steps_per_epoch or task_checks.checked_steps(config.task, task.steps_per_epoch(batch_size))
    if steps == 0:
        raise ConfigError(f"global_batch_size {batch_size} is larger than the training data of task {config.task!r}.")
    trainer.say_replicas(batch_size)
    if trainer.is_chief:
        summary_lib.write_json(workdir / "config.json", config_lib.to_dict(config))

    model = configured.build_model(trainer, config, task, lambda: build_optimizer(config, in_sync, steps))
    if not (backup and backup.goes_on()):
        configured.load_initial_weights(config, trainer, model)

    sent = None
    callbacks: list[keras.callbacks.Callback] = [throughput := throughput_lib.Throughput(batch_size)]
    if trainer.cluster and not asynchronous:
        begins = trainer.compression.start_step if trainer.compression else 0
        callbacks.append(sent := network.WireBytes(trainer.cluster, trainer.task, begins=begins))
    goodput = goodput_lib.Goodput(workdir / "goodput.bin" if trainer.is_chief else None)
    callbacks.append(goodput)
    options = {**config.monitoring.arguments(), "hparams": config_lib.to_dict(config)}
    callbacks.append(tensorboard.TensorBoard(workdir / "tensorboard", global_batch_size=batch_size, **options))
    exports = config.export.dir or os.path.join(workdir, "export")
    if config.export.best:
        best = os.path.join(exports, "best")
        callbacks.append(export_best.ExportBest(best, config.export.best, config.export.mode))
    callbacks += configured.build_callbacks(config, trainer.is_chief)
    callbacks.append(first := task_checks.FirstStep())
    elements: list[Any] = []

    def train_data(context: Any) -> Any:
        data = task_checks.checked_data(config.task, "train_data", task.train_data(context, batch_size, config.seed))
        elements.append(data.element_spec)
        return data

    eval_data = task_checks.checked_data(config.task, "eval_data", task.eval_data(batch_size), optional=True)
    with task_checks.explaining_first_step(config.task, model, first, elements):
        history = trainer.fit(
            model,
            train_data,
            validation_data=eval_data,
            validation_freq=config.validation_freq,
            epochs=config.epochs,
            steps_per_epoch=steps,
            callbacks=callbacks,
        )
    with during("saving"):
        trainer.save(model, workdir / "model.keras", delete_backup=False)
        if config.export.final:
            final = os.path.join(exports, "final")
            trainer.export(model, os.path.join(final, str(export_best.newest_version(final) + 1)))

    wire_bytes = summary_lib.wire_bytes_per_step(model, trainer.compression, replicas, sent)
    report = trainer.server_report(model)
    if config.nan_policy == "skip":
        report["skipped_updates"] = sum(int(number.numpy()) for number in skipped_updates(model))
    summary = summary_lib.summarize(
        config,
        trainer.cluster,
        replicas,
        history,
        throughput,
        wire_bytes,
        report,
        started,
        goodput.report(),
        (trainer.strategy.transport, trainer.strategy.transport_reason)
        if hasattr(trainer.strategy, "transport")
        else None,
    )
    if trainer.is_chief:
        summary["training"] = backup.training_id if backup else ""
        summary_lib.write_json(workdir / "summary.json", summary)
        summary_table.print_summary(summary, workdir)
    trainer.delete_backup()  # with everything written
    goodput.delete()
    return summary


def _import_frameworks() -> None:
    """Imports TensorFlow and Keras without the garbage collector, which would find nothing there, and take a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("tfdist.training.trainer")
    finally:
        if enabled:
            gc.enable()
    gc.freeze()  # and it skips these objects later on


def leave(code: int) -> NoReturn:
    """Ends this process after its registered exit functions, without TensorFlow's shutdown; only for `tfdist train`.

    The shutdown would take a second, on a busy machine many, in which the other tasks would miss those that have ended first
    ("stopped sending heartbeats").
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    interrupt.after_imports()
    exit_code = main(sys.argv)
    if "tensorflow" in sys.modules:
        leave(exit_code)
    sys.exit(exit_code)
