"""The backups of one `fit`: resumes from the newest backup, saves between steps, and exits after a save when preempted."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Logs, RandomGenerator, StepFunction
from tfdist.backup import compatibility, files, state, unsaved_randomness
from tfdist.backup.contents import BEFORE_ALL, FORMAT, SavePoint
from tfdist.backup.data_position import LoopPosition, TrainingPasses
from tfdist.backup.search import Size, Snapshot, check_folder, find_backup
from tfdist.backup.snapshot_writer import SnapshotWriter
from tfdist.backup.state import TrainingState, users_callbacks
from tfdist.backup.storage import Storage
from tfdist.collectives.ranks import Ranks
from tfdist.compat import optimizer_search, tf_internals
from tfdist.compat.keras_loops import pythonify_logs
from tfdist.config.backup import folder_faults
from tfdist.config.constraints import Constraint, checked, field_faults, option
from tfdist.data.python_generators import PROCESS_GENERATORS, get_states, set_states
from tfdist.engine import Engine
from tfdist.errors import BackupError, ConfigError, format_value
from tfdist.runtime.end import process_end
from tfdist.runtime.end.process_end import Preemption
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress
from tfdist.runtime.report.phase import phase

_GENERATORS = "generators of the process"


class BackupSession:
    """The session of one `fit` that is backed up. The loop calls the methods after all callbacks.

    Attributes:
        resumed_logs: The logs of the last step before a resume within an epoch, because the epoch may have no further
            steps; None otherwise.
        storage: The backups.
        training: The chief's identifier of this training run: equal after a restart, different for each new run.
    """

    passes: TrainingPasses

    def __init__(
        self,
        options: BackupOptions,
        storage: Storage,
        model: keras.Model,
        ranks: Ranks,
        arguments: Mapping[str, Any],
        engine: Engine,
        next_folder: str,
    ):
        self._next_folder = next_folder  # of the next fit of this program
        self._callbacks: Sequence[keras.callbacks.Callback] = ()
        self.resumed_logs: Any = None
        self.before_validation: Snapshot | None = None
        self._options = options
        self.storage = storage
        self._snapshots = SnapshotWriter(storage, ranks, options.keep)
        self._model = model
        self._ranks = ranks
        self._engine = engine
        self._strategy = model.distribute_strategy
        self._agreement = SaveAgreement(
            ranks, self._strategy, options.preemption, engine.peer_preempted, options.save_every_seconds
        )
        # Under parameter servers a resume is not exact anyway.
        warns = ranks.is_chief and not self._strategy.traits.asynchronous
        self._warnings = ResumeWarnings(warns)
        self._resume_from: Snapshot | None = None
        self._about: dict[str, Any] = {"fit": dict(arguments), **(options.config or {})}
        self._last_logs: Any = None
        # The point of the last backup: equal on all ranks, also while the backup is still being written.
        self._last_point: SavePoint | None = None
        self.training = uuid.uuid4().hex

    def find_backup(self) -> None:
        """Reads the newest complete backup, if one exists, after a check that no other run uses the folder. A collective.

        Call it before Keras builds anything from the random seed.
        """
        self._snapshots.lock_folder()
        had_backup = progress.had_backup(self.storage.folder)
        size = Size(self._ranks.size, self._strategy.num_replicas_in_sync, is_fixed=self._strategy.traits.asynchronous)
        reach = check_folder(self.storage, self._ranks)
        self.storage = self._snapshots.storage = dataclasses.replace(self.storage, is_shared=reach.is_shared)
        self._resume_from = find_backup(self.storage, self._ranks, size, had_backup, reach)
        current_seed = tf_internals.global_seed()
        seed = current_seed
        if self._resume_from:
            seed = self._resume_from.manifest["seed"]
            self.training = self._resume_from.manifest["training"]
        if seed is None:
            seed = int(self._ranks.broadcast_scalar(secrets.randbits(31)))
        # Setting a seed restarts TensorFlow's sequence of seeds for operations, also if the seed is the same.
        if current_seed != seed:
            tf.random.set_seed(seed)
            if self._resume_from:
                logger.warning(
                    "the random seed was not the backup's and has been set to the backup's; a shuffled dataset that was created before "
                    "has another order. Set the seed first, or give the Trainer the backup_dir."
                )
        self._seed = seed
        self._agreement.prepare(self._model)

    def watch(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Takes the training's callbacks; after a resume CSV logs are continued, not overwritten."""
        self._callbacks = callbacks
        if self._resume_from:
            for callback in state.csv_loggers(self._callbacks):
                callback.append = True

    def on_train_begin(self, planned: range) -> range:
        """Restores the state, once all variables are built. Returns the remaining epochs of `planned`, which count from 0."""
        epochs = planned.stop
        progress.write(backed_up=True)
        self._state = TrainingState(self._model, self._callbacks)
        self._state.check()
        # The variables come last: if they differ because the arguments or the model differ, the error names that cause.
        self._about |= {**compatibility.describe_model(self._model), "variables": self._state.signature()}
        self._about = compatibility.to_jsonable(self._about)
        self._trained = any(keras.ops.convert_to_numpy(o.iterations) for o in optimizer_search.optimizers(self._model))
        self._warnings.on_train_begin(self.passes, users_callbacks(self._callbacks))
        snapshot = self._resume_from
        if snapshot is None:
            self._snapshots.take_folder(BEFORE_ALL)
            return planned
        saved_about = snapshot.manifest["about"]
        for number, optimizer in self._about["optimizer"].items():
            # A learning rate that this process may have changed in an earlier fit is state: it is restored from the backup.
            if self._trained and number in saved_about["optimizer"]:
                optimizer["learning_rate"] = saved_about["optimizer"][number].get("learning_rate")
        compatibility.check_same_training(
            self._about, saved_about, self.storage.path(snapshot.point), self.storage.folder
        )
        # Only now: `take_folder` moves later backups aside, and must not touch the folder of another training.
        self._snapshots.take_folder(snapshot.point)
        self._state.resizes = snapshot.manifest["replicas"] != self._strategy.num_replicas_in_sync
        position = LoopPosition(**snapshot.manifest["position"])
        stops = snapshot.manifest["stop_training"]
        self._last_logs = self._restore(snapshot)
        self._snapshots.saved = self._last_point = snapshot.point
        for callback in state.csv_loggers(self._callbacks):
            state.cut_log(callback, position.epoch)
        first_epoch = position.epoch
        if position.epoch_step:
            self.resumed_logs = self._last_logs
        elif stops:
            first_epoch = epochs
        self.passes.resume(position, snapshot.own)
        if self._state.resizes and self._ranks.is_chief:
            logger.warning(
                f"the backup was made with {snapshot.manifest['replicas']} replicas, and this run has "
                f"{self._strategy.num_replicas_in_sync}: the order of the examples and the weights continue; moving statistics are averaged, "
                "residuals of compression are added, and each replica draws other random numbers, so the bits differ from an undisturbed run."
            )
        ignored = self._state.ignored_attributes()
        if ignored:
            logger.warning(
                f"{self.storage.path(snapshot.point)} contains {', '.join(ignored)}, which the state of these callbacks does not include: not restored"
            )
        forgotten = self._state.unsaved_callbacks()
        if forgotten:
            logger.warning(
                f"the state of {', '.join(forgotten)} is lost: a callback needs state_dict() and load_state_dict()"
            )
        if self._ranks.is_chief and first_epoch >= epochs and self._is_last():
            further = f"To train further, raise epochs. Received: {epochs}."
            if stops:
                further = "A higher number of epochs changes nothing, because a callback or stop_training has ended it."
            logger.warning(
                f"fit trains nothing: the training in backup_dir {self.storage.folder!r} finished at epoch {position.epoch} (step "
                f"{position.step}). {further} To train again from the beginning, remove its backups with trainer.delete_backup() after this fit, or by "
                "trainer.save, and start again; or choose another backup_dir."
            )
        elif self._ranks.is_chief:
            where = f"the end of epoch {position.epoch}"
            if position.epoch_step:
                where = f"step {position.epoch_step} of epoch {position.epoch + 1}"
            logger.info(f"resuming from step {position.step} ({where}) of {self.storage.path(snapshot.point)}")
        return range(first_epoch, epochs)

    def _is_last(self) -> bool:
        """Returns False if the program has begun a later fit, or if a supervisor has restarted it."""
        try:
            return not progress.restarts() and not urls.is_folder(self._next_folder)
        except OSError:  # only a warning depends on it
            return False

    def _restore(self, snapshot: Snapshot) -> Logs:
        """Restores the state and the random generators of callbacks and steps; returns the last step's logs."""
        logs = self._state.restore(snapshot.shared, snapshot.own)
        # If Python code creates the data, a thread that reads ahead draws from these generators: the data's state restores them.
        if _GENERATORS in snapshot.own and not self.passes.state.calls_python:
            set_states(PROCESS_GENERATORS, json.loads(np.asarray(snapshot.own[_GENERATORS]).item()))
        return logs

    def resumed(self, executions: Iterator[Any]) -> Iterator[Logs]:
        """Yields the remaining executions of an epoch; restores the state once more, after the callbacks' hooks at the beginning of the epoch."""
        # Keras' reset of the metrics, the hooks, and the opening of the data, which `next` does, have changed what was restored.
        first = next(executions, None)
        snapshot, self._resume_from = self._resume_from, None
        if snapshot and snapshot.manifest["position"]["epoch_step"]:
            self._restore(snapshot)
            self._model.stop_training = snapshot.manifest["stop_training"]
            if self._model.stop_training:
                return
        if first is not None:
            yield first
            yield from executions

    def on_execution_end(self, logs: Logs, new_steps: int) -> None:
        """Saves after an execution of `new_steps` steps, if a backup is due; `logs` are those of the last step."""
        self._snapshots.thread.check()
        steps_done = self.passes.position.step
        steps_before = steps_done - new_steps
        self._last_logs = logs
        self._warnings.on_execution_end(self._model.train_function, self._known_variables)
        freq = self._options.save_freq
        is_due = isinstance(freq, int) and steps_done // freq > steps_before // freq
        should_stop, should_save = self._agreement.agree(self._model.train_function)
        if should_stop:
            self._save_and_exit(self._capture())
        if should_save or is_due:
            self._save()

    def _known_variables(self) -> list[tf.Variable]:
        return [*self._state.local_variables(), self._strategy.flags, *self._strategy.gauges]

    def on_epoch_end(self, last: bool) -> None:
        """Saves at the end of an epoch, if configured, and at the end of the last epoch."""
        self._snapshots.thread.check()
        self._warnings.on_epoch_end()
        if self._ranks.size == 1 and self._agreement.is_preempted:
            self._save_and_exit(self._capture())
        if self._options.save_freq == "epoch" or last or self._model.stop_training:
            self._save(is_last=last or self._model.stop_training)

    def on_validation_begin(self) -> None:
        """Captures the state before a validation, if the process may have to save during the validation."""
        position = self.passes.position
        # A backup that is being uploaded may fail, so it does not count as saved.
        is_local = files.is_local(self.storage.folder)
        is_saved = is_local and self._last_point == SavePoint(position.step, position.epoch_step == 0)
        if self._options.preemption and not is_saved and self._agreement.can_agree(self._model.test_function):
            self.before_validation = self._capture(to_host=False)

    def on_validation_end(self) -> None:
        """Drops the state that `on_validation_begin` captured."""
        self.before_validation = None

    def on_validation_batch_end(self) -> None:
        """Saves and exits during a validation, if preempted."""
        should_stop, _ = self._agreement.agree(self._model.test_function)
        if should_stop:
            self._save_and_exit(self.before_validation)

    def on_train_end(self) -> None:
        """Waits for the last backup, and removes the oldest ones."""
        with phase("saving"):
            self._check_last(self._snapshots.settle(is_last=True))
            self._snapshots.finish()

    def release(self) -> None:
        """Releases the folder, also after an error: this process may continue to run. Waits some seconds for a backup that is being written."""
        self._snapshots.thread.wait(5.0)
        try:
            self._snapshots.release()
        except OSError:  # the next run takes the folder once this process has ended
            pass

    def _save(self, is_last: bool = False) -> None:
        with phase("saving"):
            self._snapshots.settle()
            snapshot = self._capture()
            self._last_point = snapshot.point
            self._agreement.on_save()
            self._snapshots.start(snapshot, is_last)

    def _save_and_exit(self, snapshot: Snapshot | None) -> None:
        """Saves, and exits with the code that requests a restart. `snapshot` is None if the last backup holds the state."""
        is_newer = snapshot is not None and snapshot.point != self._last_point
        reason = self._snapshots.settle(is_last=not is_newer)
        if snapshot:
            self._last_point = snapshot.point
            self._snapshots.start(snapshot, is_last=True)
            reason = self._snapshots.settle()  # one attempt, as the grace is short
        saved = self._snapshots.saved
        if not saved:
            self._check_last(reason)
        # When one task exits, a scheduler may kill the tasks that are still writing.
        try:
            self._ranks.barrier()
        except tf.errors.OpError:  # another rank could not save, and has left
            pass
        if self._ranks.is_chief:
            step = self.passes.position.step
            if reason and saved and self._last_point:
                # The exit code asks for a restart, which continues from the newest backup.
                logger.warning(
                    f"the backup {self._last_point.folder} could not be uploaded: {reason}; the newest backup is {saved.folder}"
                )
                step = saved.step
            progress.write(saved=step)
            logger.info(f"received SIGTERM: saved at step {step}{progress.how_to_continue_mine()}")
        sys.exit(process_end.PREEMPTED)

    def _check_last(self, reason: str) -> None:
        """Raises BackupError if the last backup could not be uploaded, for a reason."""
        if reason and self._last_point:
            newest = "There is no other backup"
            if self._snapshots.saved:
                newest = f"The newest backup is {self._snapshots.saved.folder}"
            raise BackupError(
                f"The last backup, {self._last_point.folder}, could not be uploaded: {reason}. {newest}. Check the storage, and start again."
            )

    def _capture(self, to_host: bool = True) -> Snapshot:
        # The variables may change, and the position does not count steps, while steps are in flight.
        self._engine.drain(self._model)
        position = self.passes.position
        shared, own = self._state.capture(self._logs(), to_host)
        own |= self.passes.state.capture()
        own[_GENERATORS] = tf.constant(json.dumps(get_states(PROCESS_GENERATORS)))
        manifest = {
            "format": FORMAT,
            "training": self.training,
            "strategy": self._strategy.config.name,
            "tasks": self._ranks.size,
            "replicas": self._strategy.num_replicas_in_sync,
            "position": dataclasses.asdict(position),
            "stop_training": bool(self._model.stop_training),
            "seed": self._seed,
            "about": self._about,
        }
        return Snapshot(SavePoint(position.step, position.epoch_step == 0), manifest, shared, own)

    def _logs(self) -> Logs:
        """Returns the logs that the epoch would have if it ended now."""
        computed: dict[str, Any] = getattr(self._model.train_function, "computed_logs", dict)()
        if not computed:
            return self._last_logs
        return {**(self._last_logs or {}), **pythonify_logs(computed)}


def _folder_faults(where: str, folder: Any) -> Iterator[str]:
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        yield f"{where} must be a text or a path. Received: {format_value(folder)}."
    elif not os.fspath(folder):
        yield f"{where} must be a folder. Received: ''."
    else:
        yield from folder_faults(where, os.fspath(folder))


_SECONDS: Constraint = (
    "a number of seconds, more than 0",
    lambda seconds: type(seconds) is not bool and isinstance(seconds, (int, float)) and seconds > 0,
)
_SWITCH: Constraint = ("True or False", (True, False).__contains__)


@dataclasses.dataclass(eq=False, repr=False)
class BackupOptions:
    """The options of backups; `BackupAndRestore`, which inherits them, describes them."""

    backup_dir: str | os.PathLike[str] = checked(dataclasses.MISSING, _folder_faults)  # noqa: RUF009 (a field)
    save_freq: str | int = option(
        "epoch",
        "'epoch' or a number of steps, 1 or more",
        lambda freq: freq == "epoch" or (type(freq) is int and freq > 0),
    )
    save_every_seconds: float | None = option(None, *_SECONDS)
    keep: int = option(2, "1 or more", lambda keep: isinstance(keep, int) and keep > 0)
    delete_checkpoint: bool = option(True, *_SWITCH)
    save_before_preemption: bool = option(True, *_SWITCH)
    grace_seconds: float = option(25.0, *_SECONDS)
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        faults: list[str] = []
        for field in dataclasses.fields(self):
            faults += field_faults(field.name, getattr(self, field.name), field)
        if faults:
            raise ConfigError(faults)
        self.backup_dir = os.fspath(self.backup_dir)

    @functools.cached_property
    def preemption(self) -> Preemption | None:
        """Receives SIGTERM; None leaves the signal alone."""
        if not self.save_before_preemption:
            return None
        return Preemption(self.grace_seconds)


@dataclasses.dataclass(eq=False)
class SaveAgreement:
    """An agreement of all ranks to save, or to save and exit, after the same execution of steps.

    Each rank writes two flags into `strategy.flags`: it is preempted, it is time to save. The training step sums them over the
    ranks, so that all ranks read the same flags at the same step.

    `peer_preempted` returns whether a task that this task needs is preempted.
    """

    ranks: Ranks
    strategy: Any
    preemption: Preemption | None
    peer_preempted: Callable[[], bool]
    save_every_seconds: float | None
    _saved_at: float = dataclasses.field(default_factory=time.monotonic)

    def prepare(self, model: keras.Model) -> None:
        """Creates the variable of the flags, which the model's step reads."""
        if self.ranks.size == 1:
            return
        if self.strategy.flags is None:
            with tf.device("CPU:0"):
                self.strategy.flags = tf.Variable(tf.zeros(2), trainable=False)
            # A step that was traced before does not read the flags.
            model.train_function = model.test_function = None
        self._note(False, False)

    @property
    def is_preempted(self) -> bool:
        """Returns whether this rank, or a task that it needs, has received SIGTERM."""
        return bool(self.preemption and (self.preemption.requested or self.peer_preempted()))

    def can_agree(self, function: StepFunction) -> bool:
        """Returns whether the ranks can agree after an execution of steps by `function`."""
        return self.ranks.size == 1 or hasattr(function, "agreed_flags")

    def agree(self, function: StepFunction) -> tuple[bool, bool]:
        """Returns whether to save and exit, and whether to save; equal on all ranks at the same step."""
        seconds = self.save_every_seconds
        should_save = bool(self.ranks.is_chief and seconds and time.monotonic() - self._saved_at >= seconds)
        if self.ranks.size == 1:
            return self.is_preempted, should_save
        # The sums of the execution that has ended. What `_note` writes is summed by the next one.
        flags = getattr(function, "agreed_flags", None)
        if self.is_preempted or should_save:
            self._note(self.is_preempted, should_save)
        if flags is None:
            return False, False
        should_stop, should_save = (flags.numpy() > 0).tolist()
        return should_stop, should_save

    def on_save(self) -> None:
        """Restarts the save timer, and resets the flag that requests a backup."""
        self._saved_at = time.monotonic()
        if self.ranks.size > 1:
            self._note(self.is_preempted, False)

    def _note(self, is_preempted: bool, should_save: bool) -> None:
        flags: tf.Variable = self.strategy.flags
        flags.assign([float(is_preempted), float(should_save)])


class ResumeWarnings:
    """Warnings about unsaved state, once for each source: for data before the training, for steps after the second execution."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._executions = 0
        self._generators: Sequence[RandomGenerator] = ()  # generators of Python code whose state backups hold
        self._watch: unsaved_randomness.StepWatch | None = None

    def on_train_begin(self, passes: TrainingPasses, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Warns of data whose random state cannot be saved; callbacks may draw while a thread reads the data."""
        if self._enabled:
            if not passes.state.calls_python:
                self._generators = PROCESS_GENERATORS
            unsaved_randomness.warn_if_inexact(list(passes.doubts(callbacks)))

    def on_execution_end(self, function: StepFunction, known_variables: Callable[[], Sequence[tf.Variable]]) -> None:
        """Watches the second execution of steps, and then warns of state that it has changed and that backups do not hold."""
        self._executions += 1
        if self._executions == 1 and self._enabled:
            self._watch = unsaved_randomness.StepWatch(function, known_variables(), self._generators)
        elif self._executions == 2:
            self.on_epoch_end()

    def on_epoch_end(self) -> None:
        """Warns of changes in the watched state, because the epoch may have had only one execution."""
        watch, self._watch = self._watch, None
        if watch:
            unsaved_randomness.warn_if_inexact(list(watch.doubts()))
