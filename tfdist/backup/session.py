"""One `fit` that is backed up: finds where to go on, puts the state back, saves, and leaves when told to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs
from tensorflow.python.eager import context as eager_context

from tfdist.backup import compatibility, unsaved_randomness
from tfdist.backup.data_position import LoopPosition, LoopTracker
from tfdist.backup.ownership import OwnershipMarker
from tfdist.backup.search import FORMAT, Snapshot, find_backup
from tfdist.backup.state import TrainingState
from tfdist.backup.storage import SHARED, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.compat import optimizer_search
from tfdist.errors import ConfigError
from tfdist.runtime import exit_status, progress
from tfdist.runtime.background import Background
from tfdist.runtime.log import log

if TYPE_CHECKING:
    from tfdist.backup.callback import BackupAndRestore

_NAMED = 5  # differences that a sentence names


class BackupSession:
    """One `fit` that is backed up."""

    def __init__(
        self,
        options: BackupAndRestore,
        storage: Storage,
        model: keras.Model,
        ranks: Ranks,
        arguments: Mapping[str, Any],
        drain: Callable[[], None],
        peer_preempted: Callable[[], bool],
        told: progress.Progress,
    ):
        self._callbacks: Sequence[keras.callbacks.Callback] = ()
        self.loop_tracker = LoopTracker(model)
        self.writer = Background()
        self.before_validation: Snapshot | None = None
        self._options = options
        self._storage = storage
        self._ownership = OwnershipMarker(storage.folder)
        self._model = model
        self._ranks = ranks
        self._drain_steps = drain
        self._peer_preempted = peer_preempted
        self._strategy = model.distribute_strategy
        self._found: Snapshot | None = None
        self._about: dict[str, Any] = {"fit": dict(arguments), **options._config}
        self._progress = told
        self._last_logs: Any = None
        self._saved: float | None = None  # the newest backup
        self._saved_at = time.monotonic()
        self._executions = 0
        self._watch: unsaved_randomness.StepWatch | None = None

    def find_backup(self) -> None:
        """Reads the newest whole backup, if there is one; before Keras builds anything from the random seed."""
        self._found = find_backup(self._storage, self._ranks, self._strategy.num_replicas_in_sync)
        before = eager_context.global_seed()
        seed = self._found.manifest["seed"] if self._found else before
        if seed is None:
            seed = int(self._ranks.broadcast_scalar(int.from_bytes(os.urandom(4), "little") >> 1))
        if before != seed:
            tf.random.set_seed(seed)
            if self._found:
                log(
                    "the random seed is not that of the backup, which now holds; a dataset that was made before, and "
                    "shuffles, comes in another order. Set one first, or give the Trainer the backup_dir."
                )
        self._seed = seed
        if self._ranks.size == 1:
            return
        if self._strategy.notes is None:
            with tf.device("CPU:0"):
                self._strategy.notes = tf.Variable(tf.zeros(2), trainable=False)
            # What was traced before takes no notes.
            self._model.train_function = self._model.test_function = None
        self._strategy.notes.assign(tf.zeros(2))

    def watch(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Takes the training's callbacks; logs in files go on where the backup was."""
        self._callbacks = callbacks
        if self._found:
            for callback in self._logs_in_files():
                callback.append = True

    def _logs_in_files(self) -> list[keras.callbacks.CSVLogger]:
        return [each for each in self._callbacks if isinstance(each, keras.callbacks.CSVLogger)]

    def on_train_begin(self, epochs: int) -> None:
        """Puts the state back, once Keras has built all variables."""
        self._state = TrainingState(self._model, self._callbacks)
        self._state.check()
        # In this order, as what comes last follows from what comes first.
        self._about |= {**compatibility.describe_model(self._model), "variables": self._state.signature()}
        self._about = compatibility.to_jsonable(self._about)
        self._trained = any(
            keras.ops.convert_to_numpy(each.iterations) for each in optimizer_search.optimizers(self._model)
        )
        if self._warns:
            unsaved_randomness.warn_if_inexact(list(self.loop_tracker.doubts()))
        found = self._found
        if found is None:
            self.loop_tracker.position.epoch = self._about["fit"].get("initial_epoch", 0)
            self._progress.write(0, 0)
            self._take_folder(after=-1)
            return
        then = compatibility.filled(found.manifest["about"], compatibility.to_jsonable(self._options._defaults))
        for number, optimizer in self._about["optimizer"].items():
            # A rate that this process may have changed before is state; the backup's holds.
            if self._trained and number in then["optimizer"]:
                optimizer["learning_rate"] = then["optimizer"][number].get("learning_rate")
        if different := list(compatibility.differences(self._about, then)):
            more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
            raise ConfigError(
                f"The backup {self._storage.path(found.step)} is of another training: {'; '.join(different[:_NAMED])}"
                f"{more}. To train from the beginning, remove {self._storage.folder!r} or choose another backup_dir."
            )
        self._take_folder(after=found.step)
        position = LoopPosition(**found.manifest["position"])
        stops = found.manifest["stop_training"]
        self._last_logs = self._state.restore(found.shared, found.own)
        self._saved = found.step
        for callback in self._logs_in_files():
            _cut_log(callback, position.epoch)
        first = epochs if stops and not position.epoch_step else position.epoch
        self.loop_tracker.resume(position, first, self._last_logs, found.own, self._restore_again)
        self._progress.write(position.step, position.step)
        if forgotten := self._state.unsaved_callbacks():
            log(f"what {', '.join(forgotten)} remembered is lost: a callback needs state_dict() and load_state_dict()")
        if self._ranks.is_chief:
            where = f"step {position.epoch_step} of epoch {position.epoch + 1}" if position.epoch_step else "the end"
            log(
                f"going on from step {position.step} ({where}{'' if position.epoch_step else f' of epoch {position.epoch}'}) "
                f"of {self._storage.path(found.step)}"
            )

    def _take_folder(self, after: float) -> None:
        """Makes the folder this run's, and removes what it has of backups after the one that the run goes on from."""
        if self._ranks.is_chief:
            self._ownership.acquire()
        self._ranks.barrier()
        self._storage.clean(after)
        self._ranks.barrier()

    def _restore_again(self) -> None:
        """Puts the state back once more, after what Keras and callbacks do at an epoch's begin."""
        found, self._found = self._found, None
        if found and found.manifest["position"]["epoch_step"]:
            self._state.restore(found.shared, found.own)
            self._model.stop_training = found.manifest["stop_training"]

    def on_execution_end(self, batch: int, steps: int | None, logs: Any) -> None:
        """Looks, after an execution of steps, whether it is time to save."""
        self.writer.check()
        before = self.loop_tracker.position.step
        self.loop_tracker.on_execution_end(batch, steps)
        now = self.loop_tracker.position.step
        self._progress.write(done=now)
        self._last_logs = logs
        self._start_watching_steps()
        freq = self._options.save_freq
        should_stop, should_save = self._agree(self._model.train_function)
        if should_stop:
            self._save_and_exit(self._capture())
        if should_save or (isinstance(freq, int) and now // freq > before // freq):
            self._save()

    def _start_watching_steps(self) -> None:
        """Says after the second execution of steps what a backup cannot hold."""
        self._executions += 1
        if self._executions == 1 and self._warns:
            known = [*self._state.local_variables(), getattr(self._strategy, "notes", None)]
            self._watch = unsaved_randomness.StepWatch(self._model.train_function, known)
        elif self._executions == 2:
            self._warn_of_watched_steps()

    def _warn_of_watched_steps(self) -> None:
        watch, self._watch = self._watch, None
        if watch:
            unsaved_randomness.warn_if_inexact(list(watch.doubts()))

    def on_epoch_end(self, epoch: int, last: bool) -> None:
        """Saves at the end of an epoch, if asked to, and of the last one."""
        self.writer.check()
        self.loop_tracker.next_epoch(epoch)
        self._warn_of_watched_steps()  # the epoch may have had one execution
        if self._ranks.size == 1 and self._is_preempted:
            self._save_and_exit(self._capture())
        if self._options.save_freq == "epoch" or last or self._model.stop_training:
            self._save()

    def on_validation_begin(self) -> None:
        """Keeps what the training is before a validation, which may have to be left."""
        if self._options.preemption:
            self.before_validation = self._capture(to_host=False)

    def on_validation_batch_end(self, batch: int) -> None:
        """Leaves a validation if told to."""
        should_stop, _ = self._agree(self._model.test_function)
        if should_stop and self.before_validation:
            self._save_and_exit(self.before_validation)

    def on_train_end(self) -> None:
        """Waits for the last backup, and removes what is too old."""
        self.writer.finish()
        self._ranks.barrier()
        self._storage.clean()
        if self._ranks.is_chief:
            self._ownership.release()

    @property
    def _warns(self) -> bool:
        """Whether this process says what makes a resume inexact; under parameter servers it is not exact anyway."""
        return self._ranks.is_chief and not isinstance(self._strategy, tf.distribute.ParameterServerStrategy)

    @property
    def _is_preempted(self) -> bool:
        return bool(self._options.preemption and (self._options.preemption.requested or self._peer_preempted()))

    def _agree(self, function: Any) -> tuple[bool, bool]:
        """Returns whether to save and go, and whether it is time to save; all ranks the same at the same step."""
        seconds = self._options.save_every_seconds
        should_save = bool(self._ranks.is_chief and seconds and time.monotonic() - self._saved_at >= seconds)
        if self._ranks.size == 1:
            return self._is_preempted, should_save
        flags = getattr(function, "agreed_flags", None)
        if self._is_preempted or should_save:
            self._strategy.notes.assign([float(self._is_preempted), float(should_save)])
        if flags is None:
            return False, False
        should_stop, should_save = (flags.numpy() > 0).tolist()
        return should_stop, should_save

    def _logs(self) -> Any:
        """Returns the last step's logs, as the epoch has them if there are no further steps in it."""
        computed: dict[str, Any] = getattr(self._model.train_function, "computed_logs", dict)()
        return {**(self._last_logs or {}), **pythonify_logs(computed)} if computed else self._last_logs

    def _capture(self, to_host: bool = True) -> Snapshot:
        self._drain_steps()
        position = self.loop_tracker.position
        shared, own = self._state.capture(self._logs(), to_host)
        own |= self.loop_tracker.state.capture()
        manifest = {
            "format": FORMAT,
            "tasks": self._ranks.size,
            "replicas": self._strategy.num_replicas_in_sync,
            "position": dataclasses.asdict(position),
            "stop_training": bool(self._model.stop_training),
            "seed": self._seed,
            "about": self._about,
        }
        return Snapshot(position.step + (0 if position.epoch_step else 0.5), manifest, shared, own)

    def _save(self) -> None:
        self.writer.finish()
        snapshot = self._capture()
        self._saved_at = time.monotonic()
        if self._ranks.size > 1:
            self._strategy.notes.assign([float(self._is_preempted), 0.0])
        self.writer.start(lambda: self._write(snapshot))

    def _save_and_exit(self, snapshot: Snapshot) -> None:
        """Saves, and ends this process with the exit code that asks for another start."""
        self.writer.finish()
        self._write(snapshot)
        with contextlib.suppress(tf.errors.OpError):  # of one that could not save
            self._ranks.barrier()  # or a scheduler might kill those that still write, as one has ended
        if self._ranks.is_chief:
            log(f"told to end (SIGTERM): saved at step {int(snapshot.step)}")
        sys.exit(exit_status.PREEMPTED)

    def _write(self, snapshot: Snapshot) -> None:
        if snapshot.step == self._saved:  # there already, the same on all ranks
            return
        storage = self._storage
        if self._ranks.is_chief:
            self._ownership.check()
        storage.write_part(snapshot.step, storage.part, snapshot.own)
        if self._ranks.is_chief:
            storage.write_part(snapshot.step, SHARED, snapshot.shared)
            self._ownership.check()
            storage.write_manifest(snapshot.step, snapshot.manifest, self._options.keep)
            self._progress.write(saved=int(snapshot.step))
        else:
            storage.clean()
        self._saved = snapshot.step


def _cut_log(callback: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes the rows from an epoch on, which is trained again, from a log that is open."""

    def is_before(line: str) -> bool:
        first = line.split(callback.sep)[0]
        return first.isdecimal() and int(first) < epoch

    callback.csv_file.flush()
    with tf.io.gfile.GFile(callback.filename) as file:
        lines = file.read().splitlines(keepends=True)
    with tf.io.gfile.GFile(callback.filename, "w") as file:
        file.write("".join(lines[:1] + list(filter(is_before, lines[1:]))))
    callback.on_train_begin()  # opens it again
