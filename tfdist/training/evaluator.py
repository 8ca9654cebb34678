"""The evaluator: a process beside the cluster that evaluates each backup of a training run, and the trained model."""

from __future__ import annotations

import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.backup.contents import SavePoint
from tfdist.backup.files import ReadError
from tfdist.backup.storage import Storage
from tfdist.config import TrainConfig
from tfdist.config.train import backup_arguments
from tfdist.errors import ConfigError
from tfdist.monitoring.event_files import BY_ITERATIONS, Run
from tfdist.monitoring.tensorboard import is_number
from tfdist.runtime.files import open_own, read_file
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress
from tfdist.training import configured, task_checks
from tfdist.training.backup_export import load_weights, read_weights
from tfdist.training.summary import finite_or_none
from tfdist.training.trainer import Trainer

MODEL = "model.keras"
EVALUATIONS = "evaluations.jsonl"
_LOOK_EVERY = 0.5  # seconds between two searches for a backup
# Seconds for which a backup may look damaged while it is removed, or not yet visible on this host.
_SETTLES_WITHIN = 3.0


def evaluate_backups(config: TrainConfig, workdir: Workdir, task: str) -> None:
    """Evaluates the backups of a training run of other processes, on one device, until that run has finished.

    `config` and `workdir` are those of the run; `task` is the name of this task. Raises ConfigError without validation data.
    """
    configured.fix_threads(config)
    trainer = Trainer("one_device", cluster=False)
    configured.prepare_process(config)
    trained = task_checks.make_task(config.task, config.task_options)
    batch_size = config.global_batch_size or config.per_replica_batch_size
    data = task_checks.checked_data(config.task, "eval_data", trained.eval_data(batch_size), is_validation=True)
    if data is None:
        raise ConfigError(f"The evaluator needs validation data, but eval_data() of task {config.task!r} returns None.")
    model = configured.build_model(trainer, config, trained, keras.optimizers.SGD)  # the optimizer is never used
    backup_dir = backup_arguments(config, workdir)["backup_dir"]
    Evaluator(model, data, backup_dir, workdir, task, config.optimizer.use_ema).run()


class Evaluator:
    """A loop that evaluates the backups of another process's training run. It joins no collective and writes no backup.

    The model was built in the scope of a trainer of one device, and compiled. `final_differs` says whether the trained model's weights
    differ from those of the last backup.
    """

    def __init__(
        self,
        model: keras.Model,
        data: tf.data.Dataset,
        backup_dir: str,
        workdir: Workdir,
        task: str,
        final_differs: bool,
    ):
        self._model = model
        self._data = data
        self._storage = Storage(backup_dir, 0, 1)
        self._workdir = workdir
        self._final_differs = final_differs
        self._log = EvaluationLog(workdir.logs, task)
        self._signs_of_life = keras.callbacks.LambdaCallback()
        self._signs_of_life.on_test_batch_end = lambda batch, logs=None: progress.touch()
        self._seen: set[tuple[SavePoint, int]] = set()  # save points, and when they were written
        self._waits = False  # for a storage that cannot be read now
        self._doubtful: dict[tuple[SavePoint, int], float] = {}  # backups that look damaged, and since when

    def run(self) -> None:
        """Evaluates each complete backup, then the trained model; returns when the training has finished and all backups are evaluated."""
        if not self._model.built:
            self._model.evaluate(self._data.take(1), verbose=0)
        logger.info(f"evaluating each new backup in {self._storage.folder}")
        while True:
            # Read first, so that the search below sees every backup that was written before the summary.
            summary = self._summary()
            has_new = False
            for point, manifest, weights in self._new_backups():
                has_new = True
                load_weights(self._model, weights, self._storage.path(point))
                epoch = manifest["position"]["epoch"]
                self._evaluate(manifest["training"], point.step, epoch, point.folder, self._storage.path(point))
            if not has_new and summary and not self._doubtful and not self._waits:
                self._evaluate_final(summary)
                return
            if not has_new:
                time.sleep(_LOOK_EVERY)

    def _summary(self) -> dict[str, Any] | None:
        """Returns the summary of the training once it has finished, else None. Ignores the file of an earlier training."""
        path = os.path.join(self._workdir, "summary.json")
        try:
            begun = max(storage.modified(os.path.join(self._workdir, "config.json")) / 1e9, progress.launched())
            if storage.modified(path) / 1e9 >= begun:
                return json.loads(storage.read(path))
        except (FileNotFoundError, storage.PassingError):  # it is read again soon
            pass
        return None

    def _new_backups(self) -> Iterator[tuple[SavePoint, Mapping[str, Any], Any]]:
        """Yields the backups to evaluate, oldest first; the training may remove backups in the meantime."""
        try:
            points = self._storage.points()
        except ReadError as e:
            # A local folder that cannot be read stays so; an object store may answer again.
            if not storage.is_url(self._storage.folder):
                raise
            if not self._waits:
                logger.warning(f"{e}; the evaluator tries again until it can be")
            self._waits = True
            return
        self._waits = False
        newest = next(filter(self._storage.is_complete, points), None)
        doubtful = {}
        for point in reversed(points):
            is_complete = self._storage.is_complete(point)
            # A training that begins anew writes other backups to the same save points.
            written_at = self._storage.written_at(point) if is_complete else 0
            key = (point, written_at)
            if key in self._seen:
                continue
            why = ""
            try:
                if is_complete:
                    manifest = self._storage.read_manifest(point)
                    if not self._log.contains(manifest["training"], point.step):
                        _, weights = read_weights(self._storage, point)
                        self._seen.add(key)
                        yield point, manifest, weights
                    self._seen.add(key)
                elif newest and point < newest and self._storage.has_begun(point):
                    why = f"{self._storage.path(point)} was not finished"
            except (ReadError, ConfigError) as e:
                # The training may have removed the backup while it was read: then it is not damaged.
                if self._storage.is_complete(point):
                    why = str(e)
            since = self._doubtful.get(key, time.monotonic())
            if why and time.monotonic() - since > _SETTLES_WITHIN:
                self._seen.add(key)
                logger.warning(f"{why}; the evaluator skips this backup")
            elif why:
                doubtful[key] = since
        self._doubtful = doubtful

    def _evaluate_final(self, summary: Mapping[str, Any]) -> None:
        training = summary.get("training") or ""
        step = summary["steps"]
        # The last backup holds the same weights, unless the training replaces them by averages at its end.
        evaluated = MODEL if self._final_differs else ""
        if self._log.contains(training, step, evaluated):
            return
        path = os.path.join(self._workdir, MODEL)
        with warnings.catch_warnings(), configured.local_copy(path) as local:
            # The optimizer has no slots here, as it trains nothing.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            self._model.load_weights(local)
        self._evaluate(training, step, summary["epochs"], MODEL, path)

    def _evaluate(self, training: str, step: int, epoch: int, backup: str, path: str) -> None:
        progress.write(done=step, epoch=epoch)
        arguments = {"verbose": 0, "return_dict": True, "callbacks": [self._signs_of_life]}
        metrics = self._model.evaluate(self._data, **arguments)
        self._log.add(training, step, epoch, backup, metrics)
        self._workdir.upload()
        values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if isinstance(value, float))
        logger.info(f"step {step} (epoch {epoch}): {values}, of {path}")


class EvaluationLog:
    """The results of a training run's evaluations: a file with one line of JSON each, which outlives the process, and curves in TensorBoard.

    Attributes:
        rows: The lines: `step`, `epoch`, `backup`, `training`, `time` and `metrics`.
    """

    def __init__(self, workdir: pathlib.Path, task: str):
        self._path = workdir / EVALUATIONS
        self._run = Run(str(workdir / "tensorboard" / task))
        self._works = True
        self.rows = list(self._read())
        # Draw the curves again from the lines: a killed process may have written a line without its curves, or the reverse.
        self._try(lambda: self._run.cut({}))
        for row in self.rows:
            self._draw(row)

    def _read(self) -> Any:
        if self._path.exists():
            for line in read_file(self._path).decode(errors="replace").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # its writer was killed
                    pass

    def contains(self, training: str, step: int, backup: str = "") -> bool:
        """Returns whether a step of a training has been evaluated; an empty `backup` matches every backup."""
        return any(
            (row["training"], row["step"]) == (training, step) and backup in ("", row["backup"]) for row in self.rows
        )

    def add(self, training: str, step: int, epoch: int, backup: str, metrics: dict[str, Any]) -> None:
        """Appends a line, after it has moved the lines and curves of another training to other files."""
        if any(row["training"] != training for row in self.rows):
            self._path.replace(self._path.with_name("evaluations.before.jsonl"))
            self._try(self._run.set_aside)
            self.rows = []
        metrics = {name: finite_or_none(value) for name, value in metrics.items()}
        row = {"step": step, "epoch": epoch, "metrics": metrics}
        row |= {"backup": backup, "training": training, "time": round(time.time(), 3)}
        line = f"{json.dumps(row)}\n"
        # The last writer may have been killed within a line.
        if self._path.exists() and not read_file(self._path).endswith(b"\n"):
            line = f"\n{line}"
        with open(open_own(self._path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
        self.rows.append(row)
        self._draw(row)

    def _draw(self, row: dict[str, Any]) -> None:
        metrics = {name: value for name, value in row["metrics"].items() if value is not None and is_number(value)}
        values = {BY_ITERATIONS.format(name=name): float(value) for name, value in metrics.items()}
        self._try(lambda: self._run.write(values, row["step"], row["time"]))
        self._try(self._run.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            if self._works:
                action()
        except (tf.errors.OpError, OSError) as e:
            self._works = False
            logger.warning(f"the evaluator stops writing curves, and continues {self._path} ({e}).")
