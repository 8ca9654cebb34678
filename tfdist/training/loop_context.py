"""The surroundings of a loop on this rank: watched peers, the engine, backups, the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.aliases import Data
from tfdist.backup import compatibility
from tfdist.backup.callback import BackupAndRestore
from tfdist.backup.session import BackupSession
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives.ranks import Ranks
from tfdist.engine import Engine
from tfdist.runtime.end import process_end
from tfdist.runtime.log import BARE, logger
from tfdist.runtime.report import progress
from tfdist.runtime.report.phase import phase
from tfdist.training import checks, console, lost_workers

# Arguments of `fit` that must be equal to those of the backup.
_MUST_EQUAL_BACKUP = {
    *("batch_size", "class_weight", "initial_epoch", "own_sizes", "shuffle", "steps_per_epoch", "validation_split")
}


@dataclasses.dataclass(eq=False)
class LoopContext:
    """The context in which a trainer runs Keras' loops; `cluster` is None if this process trains alone."""

    strategy: Any
    engine: Engine
    ranks: Ranks
    cluster: ClusterSpec | None
    task: TaskSpec
    backup: BackupAndRestore | None
    check_weights: bool
    callbacks_differ: bool = (
        False  # whether a `fit` runs in which some rank has callbacks of its own, which may save alone
    )
    _depth: int = 0  # of nested calls that work on a model
    _has_printed_replicas: bool = False
    _notices: set[str] = dataclasses.field(default_factory=set)

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes files and shows progress."""
        return self.ranks.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers, or, under parameter servers, of workers."""
        return self.engine.num_replicas

    @property
    def is_at_work(self) -> bool:
        """Returns whether a method of the trainer is running."""
        return self._depth > 0

    def notify_once(self, notice: str) -> None:
        """Logs a notice on the chief, unless this trainer has logged the same before."""
        if self.is_chief and notice not in self._notices:
            self._notices.add(notice)
            logger.info(notice)

    def attach(self, model: keras.Model, method: str) -> None:
        """Checks a model, and gives it the step function of this strategy; `method` is the trainer's method that was called."""
        checks.check_model(model, self.strategy, method)
        self.engine.attach(model)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Marks the trainer as at work: within the context, the model's methods run as Keras' own."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def stepping(self, model: keras.Model) -> Iterator[None]:
        """Prepares a single step of an attached model, and restores the context after it."""
        with self.working(), self.engine.running(model):
            yield

    def watching_workers(self) -> contextlib.AbstractContextManager[None]:
        """Aborts the collectives within the context when another worker is lost."""
        if self.cluster and self.ranks.size > 1:
            return lost_workers.abort_on_lost_workers(self.cluster, self.task)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Prepares a loop of an attached model, and restores the context after it."""
        marks = self.strategy.statistics.caller_marks_changes()
        engine = self.engine.running(model)
        with self.working(), marks, self.watching_workers(), engine, warnings.catch_warnings():
            if not self.is_chief:
                warnings.filterwarnings("ignore", message=".*ran out of data")  # the chief warns once for all ranks
            try:
                yield
            except SystemExit as e:
                # As Python: None means 0, and another object than a number is a message and means 1.
                process_end.exit_code = int(e.code is not None)
                if isinstance(e.code, int):
                    process_end.exit_code = e.code
                process_end.amid_training = True
                raise

    @contextlib.contextmanager
    def backing_up(
        self, backup: BackupAndRestore | None, model: keras.Model, data: Data, fit_arguments: dict[str, Any]
    ) -> Iterator[BackupSession | None]:
        """Backs up the `fit` within the context, and resumes it from an existing backup. Yields the session for the loop, or None if `backup` is None."""
        with progress.training():
            if backup is None:
                yield None
                return
            same = {name: value for name, value in fit_arguments.items() if name in _MUST_EQUAL_BACKUP}
            # Without own rows, and in backups of earlier versions, there is no entry.
            if same["own_sizes"] is None:
                del same["own_sizes"]
            same["data"] = compatibility.describe_data(data, fit_arguments.get("y"))
            with backup.training(model, self.ranks, same, self.engine) as session:
                yield session

    def delete_backup(self, backup: BackupAndRestore | None, at_once: bool = False) -> None:
        """Removes the backups of finished trainings; `at_once` as for `BackupAndRestore.delete`. A collective."""
        with self.watching_workers(), phase("call", "delete_backup"):
            self.ranks.barrier()  # no rank is still in `fit`
            if backup:
                backup.delete(at_once)
            self.ranks.barrier()  # without it, one rank might write a new backup while another one still removes

    def print_replicas(self, global_batch_size: int | None, whole_items: bool = False) -> None:
        """Prints the number of replicas of the training, once and only on the chief. With `whole_items` each worker trains on items of its own."""
        if self._has_printed_replicas or not self.is_chief:
            return
        self._has_printed_replicas = True
        sentence = console.describe_replicas(self.num_replicas, global_batch_size, self.strategy.traits.asynchronous)
        if whole_items and self.ranks.size > 1:
            sentence += f"; a step trains on {self.ranks.size} items of the data, one from each worker (shard='items')"
        logger.info(f"{self.strategy.config.name}: {sentence}", extra=BARE)
