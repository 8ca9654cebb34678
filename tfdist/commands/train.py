"""Trains the model of a preset or a config file: `tfdist train --config=digits --workdir=DIR`.

`python -m tfdist.train` is the same command.
With a cluster in the environment (TF_CONFIG) this process is one task of the cluster. Without a cluster,
`--config.cluster.workers=2` starts two tasks on this machine and watches them. Set fields of the configuration
as `--config.optimizer.momentum=0.9`. Exit code 0 means that the training has finished; 2, that the
configuration is invalid; 75, that the training has saved after SIGTERM: the same command resumes it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfdist.cluster import local_cluster, task_versions
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import ClusterTask
from tfdist.commands import summary_table
from tfdist.compat import keras_backend
from tfdist.config import TrainConfig, validation
from tfdist.config import flags as flags_lib
from tfdist.config import train as config_lib
from tfdist.config.cluster import worker_range
from tfdist.errors import BackupError, ClusterError, ConfigError, DataError, collect_errors, format_value
from tfdist.launch.launcher import Launcher
from tfdist.launch.sizes import Sizes
from tfdist.runtime import late_removal, mirror, ownership, process_end, progress, stacks, storage, tensorflow_log
from tfdist.runtime.files import WriteError, read_file
from tfdist.runtime.log import logger, print_always
from tfdist.runtime.phase import phase

if TYPE_CHECKING:
    from tfdist.training.trainer import Trainer

_SOURCE = "TFDIST_SOURCE"  # set for the tasks that this command starts: their cluster's source. This command prints the results, not the tasks


_FILES = ("config.json", "model.keras", "summary.json")


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
                workers = len(resolved.cluster.training_tasks()) if resolved else None
                _check_evaluator(command.config, resolved)
            if list(storage.faults("workdir", os.fspath(command.workdir))):  # without a connection
                validation.check(command.config, workers, command.faults)
            finished = FinishedRun(command.config, command.workdir, command.overwrite)
            with collect_errors(faults):
                # An evaluator may evaluate a finished run's remaining backups.
                if not (resolved and resolved.task.type == "evaluator"):
                    finished.check()
            validation.check(command.config, workers, command.faults)
            if not faults:
                return _run(command.config, command.workdir, resolved, argv, finished)
    except (ClusterError, BackupError, DataError, WriteError, FloatingPointError) as e:
        logger.error(e)
        return 1
    for fault in faults:
        logger.error(fault)
    return process_end.FAULTY_CONFIG


def _find_cluster(config: TrainConfig) -> ResolvedCluster | None:
    arguments = config.cluster.resolver_arguments()
    arguments["source"] = os.environ.get(_SOURCE, arguments["source"])
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
    workdir: pathlib.Path | str,
    resolved: ResolvedCluster | None,
    argv: Sequence[str],
    finished: FinishedRun,
) -> int:
    """Trains as a task of the resolved cluster, or alone, or starts the training tasks; returns the exit code."""
    if resolved is None and (hint := discovery.misconfiguration_hint()):
        logger.warning(f"training on this host alone, though {hint}.")
    evaluates = resolved is not None and resolved.task.type == "evaluator"
    with contextlib.ExitStack() as owned:
        is_owner = resolved is None or resolved.task == resolved.cluster.chief
        if isinstance(workdir, str):
            _check_reach(config, workdir, resolved)
            folder = _logs_folder(workdir, is_owner)
            owned.callback(mirror.close, workdir)
        else:
            folder = workdir
            if is_owner or evaluates:
                owned.enter_context(own_workdir(workdir, resolved.task.name if resolved and evaluates else ""))
        if is_owner and not evaluates:
            finished.replace()
        return _run_owned(config, workdir, folder, resolved, argv)


def _check_reach(config: TrainConfig, url: str, resolved: ResolvedCluster | None) -> None:
    if (resolved or config.cluster.starts_tasks) and url.startswith("memory://"):
        raise ConfigError(f"workdir {format_value(url)} exists in one process only: give a URL that all tasks reach.")


def _logs_folder(workdir: pathlib.Path | str, owns: bool = False) -> pathlib.Path:
    """Returns the local folder of a run's logs: the work directory, or the mirror of its URL."""
    if isinstance(workdir, pathlib.Path):
        return workdir
    return mirror.launchers_folder(workdir) or mirror.opened(workdir, "workdir", _is_log, owns).folder


def _is_log(path: str) -> bool:
    """Returns whether a file below a work directory is one that a continued run appends to."""
    return path.startswith(("tensorboard/", "logs/")) or path.endswith((".csv", ".jsonl", ".bin"))


def _run_owned(
    config: TrainConfig,
    workdir: pathlib.Path | str,
    logs: pathlib.Path,
    resolved: ResolvedCluster | None,
    argv: Sequence[str],
) -> int:
    evaluates = resolved is not None and resolved.task.type == "evaluator"
    if resolved is None and config.cluster.starts_tasks:
        return launch(config, argv, workdir, logs)
    process_end.limit_interrupts()
    stacks.default_folder = os.path.abspath(logs / "logs")
    fields = {name: getattr(config, name) for name in ("epochs", "nan_policy", "callbacks", "initial_weights")}
    text = json.dumps({**config_lib.fixed(config), **fields}, default=str)
    task_versions.configuration = task_versions.checksum(text.encode())
    if config.backup.save_freq != "never" and threading.current_thread() is threading.main_thread():
        # The Trainer takes over some seconds later, once TensorFlow is loaded.
        signal.signal(signal.SIGTERM, process_end.end_at_once)
    if resolved and evaluates:
        _import_frameworks()
        importlib.import_module("tfdist.training.evaluator").evaluate_backups(config, workdir, logs, resolved.task.name)
        return 0
    code = process_end.run_to_the_end(lambda: train(config, workdir, cluster=resolved.apply() if resolved else False))
    if not code and resolved:
        progress.mark_finished(resolved.task.name)
    return code


class FinishedRun:
    """The finished run in a work directory, if any, which a new run in the directory would replace.

    A run has finished once its `summary.json` exists. If there are backups, too, the new run continues from them:
    a later run was interrupted, or the finished run was killed before it removed them. With `backup.delete_checkpoint=false` the finished run's backups stay,
    and a run with more epochs continues from them.

    Args:
        config: The configuration of the new run.
        workdir: The work directory, a text if it is a URL.
        overwrite: Whether the new run may replace the finished run.
    """

    def __init__(self, config: TrainConfig, workdir: pathlib.Path | str, overwrite: bool):
        self._config, self._workdir, self._overwrite = config, workdir, overwrite
        self._backups = config.backup.dir or os.path.join(workdir, "backup")
        # A task that a supervisor started belongs to the run in this directory, so it replaces nothing.
        self._summary = (
            None if _SOURCE in os.environ or progress.restarts() else _read_json(os.path.join(workdir, "summary.json"))
        )
        self._kept: list[dict[str, Any]] = []
        if self._summary is not None and config.backup.save_freq != "never":
            with contextlib.suppress(OSError, ValueError):  # the folder does not exist
                names = [name for name in storage.list_folder(self._backups) if name.startswith("step-")]
                manifests = (_read_json(os.path.join(self._backups, name, "manifest.json")) for name in names)
                self._kept = [body for body in manifests if body is not None]

    def check(self) -> None:
        """Raises a ConfigError if the new run would replace a finished run without `overwrite`."""
        if self._overwrite or not self._is_replaced():
            return
        how_to_continue = (
            "raise --config.epochs"
            if self._kept
            else (
                f"begin in another --workdir with --config.initial_weights={self._workdir}/model.keras; its backups were removed (with "
                "--config.backup.delete_checkpoint=false they stay, and a higher --config.epochs continues from them)"
            )
        )
        raise ConfigError(
            f"workdir {format_value(str(self._workdir))} holds a finished run. Choose another --workdir; or train again from the beginning "
            f"with --overwrite, which replaces model.keras at its end; or, to train further, {how_to_continue}."
        )

    def replace(self) -> None:
        """Logs that the finished run will be replaced, and removes its backups; does nothing if the finished run is not replaced."""
        if not self._is_replaced():
            return
        logger.info(
            f"{self._workdir} holds a finished run; training again from the beginning. Its model.keras and summary.json stay until this "
            "run has finished, which then replaces them"
        )
        if self._kept:
            late_removal.remove_backups(self._backups)

    def _is_replaced(self) -> bool:
        if self._summary is None or not self._kept:
            return self._summary is not None
        is_own = all(body.get("training") == self._summary.get("training") for body in self._kept)
        further = max(_number(body.get("position"), "step") for body in self._kept) > _number(self._summary, "steps")
        if not is_own or self._config.backup.delete_checkpoint or further:
            return False
        return self._overwrite or self._config.epochs <= _number(self._summary, "epochs")


def _number(body: Any, name: str) -> int:
    value = body.get(name) if isinstance(body, dict) else None
    return value if isinstance(value, int) else 0


def _read_json(path: str) -> dict[str, Any] | None:
    """Returns the object in a JSON file, an empty dict if the content is not an object, or None if the file cannot be read.

    Raises:
        ConfigError: The file is at a URL that cannot be read now, so whether it exists is unknown.
    """
    try:
        text = storage.with_retries(lambda: storage.read(path)) if storage.is_url(path) else read_file(path)
    except storage.StorageError as e:
        raise ConfigError(f"workdir must be a folder that can be read and written: {storage.reason(e)}.") from None
    except (OSError, ValueError):  # such as a path with a null byte
        return None
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    return body if isinstance(body, dict) else {}


@contextlib.contextmanager
def own_workdir(workdir: pathlib.Path, task: str = "") -> Iterator[None]:
    """Creates the work directory, and locks it against other runs within the context.

    Args:
        workdir: The folder.
        task: The name of an evaluator, which shares the folder with the run that owns it; empty means the owner.

    Raises:
        ConfigError: The folder cannot be created or written, another run owns it, or it contains another user's link.
    """
    owner = ownership.Ownership(workdir, "workdir", f"{ownership.FILE}-{task}" if task else ownership.FILE)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for path in filter(pathlib.Path.is_symlink, workdir.iterdir()):
            if (user := path.lstat().st_uid) not in (os.geteuid(), workdir.stat().st_uid):
                raise ConfigError(
                    f"{format_value(str(path))} is a symbolic link of user {user}, through which the run would write elsewhere: remove it, or "
                    "choose another --workdir, in which no other user can write."
                )
        for path in map(workdir.joinpath, _FILES):
            if path.is_dir():
                raise ConfigError(
                    f"{format_value(str(path))} must be a file of the run, and is a folder: remove it, or choose another --workdir."
                )
        owner.check_free()
    except ConfigError:
        raise
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"workdir must be a folder that can be written to. Received: {format_value(str(workdir))} ({why})."
        ) from None
    with owner:
        yield


def launch(config: TrainConfig, argv: Sequence[str], workdir: pathlib.Path | str, folder: pathlib.Path) -> int:
    """Starts this command again for each task of a cluster on this machine; returns the exit code. `folder` is that of the logs."""
    if os.path.lexists(logs := folder / "logs") and not logs.is_dir():
        raise ConfigError(
            f"{format_value(str(logs))} must be a folder for the tasks' output, and is a file: remove it, or choose another --workdir."
        )
    # The tasks get their cluster in TF_CONFIG, whatever the source is here.
    command = [sys.executable, "-m", "tfdist.train", *argv[1:]]
    workers = worker_range(config.cluster.workers)
    cluster = local_cluster(workers.most, config.cluster.ps)
    environ = {**os.environ, _SOURCE: "tf_config", ownership.JOB: ownership.this_run()}
    if isinstance(workdir, str):
        environ |= mirror.opened(workdir, "workdir", _is_log).for_tasks()
    limits: dict[str, Any] = {"grace_seconds": config.grace_seconds, "max_restarts": config.max_restarts}
    limits |= {"evaluator": config.cluster.evaluator > 0, "fresh_ports": True, "must_finish": True}
    limits |= {"warm": config.cluster.warm > 0}
    if workers.is_elastic:
        limits["sizes"] = Sizes(*workers, config.strategy.replicas, config.cluster.join_seconds)
    code = Launcher(command, cluster, logs, environ, **limits).run()
    if code == 0:
        summary_table.print_summary(_read_json(os.path.join(workdir, "summary.json")) or {}, workdir)
    return code


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    trainer: Trainer | None = None,
    cluster: ClusterTask | Literal[False] | None = None,
) -> dict[str, Any]:
    """Runs one task of a training and, on the chief, writes the run's files.

    Args:
        config: The configuration, checked by `validation.check`.
        workdir: The folder of `summary.json`, `config.json`, `model.keras` and `tensorboard/`, or its URL.
        trainer: An existing trainer with its strategy. None creates a trainer from `config`.
        cluster: As for the `Trainer`.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: The configuration does not fit the available devices.
    """
    started = time.perf_counter()
    _import_frameworks()
    import keras

    from tfdist.backup.callback import BackupAndRestore
    from tfdist.gradients.configured_optimizer import build_optimizer
    from tfdist.gradients.optimizer import skipped_updates
    from tfdist.monitoring import goodput as goodput_lib
    from tfdist.monitoring import network, tensorboard
    from tfdist.monitoring import summary as summary_lib
    from tfdist.monitoring import throughput as throughput_lib
    from tfdist.training import configured, export_best, task_checks
    from tfdist.training.trainer import Trainer

    workdir = os.fspath(workdir)
    is_url = storage.is_url(workdir)
    logs = _logs_folder(workdir if is_url else pathlib.Path(workdir))
    backup: BackupAndRestore | None = None
    configured.fix_threads(config)
    if trainer is None:
        options = {
            name: getattr(config, name) for name in ("compression", "start_timeout", "check_weights", "nan_policy")
        }
        saves = config.backup.save_freq != "never"
        backup = BackupAndRestore(**config_lib.backup_arguments(config, workdir)) if saves else None
        trainer = Trainer(config.strategy, cluster, backup=backup, **options)
    configured.prepare_process(config)

    replicas = trainer.num_replicas
    asynchronous = config.strategy.traits.asynchronous  # each step runs on one worker
    in_sync = 1 if asynchronous else replicas
    batch_size = config.global_batch_size or config.per_replica_batch_size * in_sync
    validation.per_replica_batch_size(batch_size, in_sync)
    task = task_checks.make_task(config.task, config.task_options)
    steps = config.steps_per_epoch or task_checks.checked_steps(config.task, task.steps_per_epoch(batch_size))
    if steps == 0:
        raise ConfigError(f"global_batch_size {batch_size} is larger than the training data of task {config.task!r}.")
    trainer.print_replicas(batch_size)
    if trainer.is_chief:
        summary_lib.write_json(os.path.join(workdir, "config.json"), config_lib.to_dict(config))

    model = configured.build_model(trainer, config, task, lambda: build_optimizer(config, in_sync, steps))
    if not (backup and backup.resumes()):
        configured.load_initial_weights(config, trainer, model)

    sent = None
    callbacks: list[keras.callbacks.Callback] = [throughput := throughput_lib.Throughput(batch_size)]
    if trainer.cluster and not asynchronous:
        begins = trainer.compression.start_step if trainer.compression else 0
        callbacks.append(sent := network.WireBytes(trainer.cluster, trainer.task, begins=begins))
    goodput = goodput_lib.Goodput(logs / "goodput.bin" if trainer.is_chief else None)
    callbacks.append(goodput)
    options = {**config.monitoring.arguments(), "hparams": config_lib.to_dict(config)}
    callbacks.append(tensorboard.TensorBoard(logs / "tensorboard", global_batch_size=batch_size, **options))
    exports = config.export.dir or os.path.join(workdir, "export")
    if trainer.is_chief and (config.export.best or config.export.final):
        configured.make_export_folder(exports)
    if config.export.best:
        best = os.path.join(exports, "best")
        callbacks.append(export_best.ExportBest(best, config.export.best, config.export.mode))
    callbacks += configured.build_callbacks(config, trainer.is_chief, (workdir, str(logs)) if is_url else ("", ""))

    def train_data(context: Any) -> Any:
        return task_checks.checked_data(config.task, "train_data", task.train_data(context, batch_size, config.seed))

    eval_data = task_checks.checked_data(config.task, "eval_data", task.eval_data(batch_size), is_validation=True)
    history = trainer.fit(
        model,
        train_data,
        validation_data=eval_data,
        validation_freq=config.validation_freq,
        epochs=config.epochs,
        steps_per_epoch=steps,
        callbacks=callbacks,
    )
    with phase("saving"):
        if is_url and trainer.is_chief:
            mirror.check_owner(workdir, "workdir")
        trainer.save(model, os.path.join(workdir, "model.keras"), delete_backup=False)
        if config.export.final:
            final = os.path.join(exports, "final")
            path = os.path.join(final, str(export_best.newest_version(final) + 1))
            trainer.export(model, path, delete_backup=False)

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
        (trainer.strategy.transport, trainer.strategy.transport_reason) if trainer.strategy.transport else None,
    )
    if trainer.is_chief:
        summary["training"] = backup.training_id if backup else ""
        before = _read_json(os.path.join(workdir, "summary.json")) or {}
        if backup and all(before.get(name) == summary[name] for name in ("training", "steps")):
            # The previous process was killed after the training: this one has no measurements.
            summary = {
                **before,
                "restarts": summary["restarts"],
            }
        summary_lib.write_json(os.path.join(workdir, "summary.json"), summary)
        if _SOURCE not in os.environ:
            summary_table.print_summary(summary, workdir)
    trainer.on_model_saved(model)  # after all files are written
    goodput.delete()
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
