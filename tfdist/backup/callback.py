"""`BackupAndRestore`: an interrupted training run resumes as if it had not been interrupted.

A backup is captured between two steps and written while the next steps run. A run that finds a backup builds the model and then restores
all state: variables, each replica's own values, the state of callbacks, the position in the data.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Logs
from tfdist.backup.search import read_seed
from tfdist.backup.session import BackupOptions, BackupSession
from tfdist.backup.storage import Storage
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_internals
from tfdist.config.backup import folder_faults
from tfdist.engine import Engine
from tfdist.errors import BackupError, ConfigError, format_value
from tfdist.runtime import late_removal, progress
from tfdist.runtime.storage import is_url


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a training run, so that the next run of the same program continues from there with bitwise equal results.

    Pass a `backup_dir` to the Trainer, or this callback to `Trainer.fit` (on every rank). Unlike
    `keras.callbacks.BackupAndRestore` it continues at the exact step, saves the state of replicas and callbacks, and
    is safe with several workers. Arguments that Keras' callback also has mean the same. A custom callback is backed up if it has
    `state_dict()`, which returns plain values and arrays, and `load_state_dict(state)`. After the end of `fit` the last backup
    stays until `Trainer.save`, or the model's own `save` or `export`, has written the model.

    Args:
        backup_dir: A folder that no other training uses: a path, or a URL for fsspec, such as `s3://bucket/run`. If the tasks do not share the
            path's folder, the chief stores the backups of all tasks on its host.
        save_freq: Steps between backups, or `"epoch"` for one after each epoch.
        save_every_seconds: Also save when the last backup is older than this. None means no such limit.
        keep: Number of backups to keep. If the newest is damaged, a run restores an older one.
        delete_checkpoint: Whether saving the model after `fit` removes the backups.
        save_before_preemption: When any task gets SIGTERM, all tasks save at the same step and exit with code 75. False
            leaves SIGTERM alone.
        grace_seconds: Time from SIGTERM to the exit. A process that still saves after nine tenths of this time exits then.
        config: Further plain values that must be the same in the run that resumes.

    Raises:
        ConfigError: An argument is out of range, or `backup_dir` is a file.

    Attributes:
        options: The arguments. `backup_dir`, `save_freq`, `save_every_seconds`, `keep` and `delete_checkpoint` are also read-only
            attributes of the callback.
        training_id: On the chief, the identifier of the last `fit` in its backups; empty before the first `fit`.

    Examples:
        >>> import tempfile, tfdist
        >>> backup = tfdist.BackupAndRestore(tempfile.mkdtemp(), save_freq=100)
        >>> trainer = tfdist.Trainer("mirrored", backup=backup)
        >>> backup.save_freq
        100
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        save_every_seconds: float | None = None,
        keep: int = 2,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = True,
        grace_seconds: float = 25.0,
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        seconds = {"save_every_seconds": save_every_seconds, "grace_seconds": grace_seconds}
        switches = {"delete_checkpoint": delete_checkpoint, "save_before_preemption": save_before_preemption}
        if faults := list(_type_faults(backup_dir, seconds, switches)):
            raise ConfigError(faults)
        self.options = BackupOptions(
            backup_dir=os.fspath(backup_dir),
            save_freq=save_freq,
            save_every_seconds=save_every_seconds,
            keep=keep,
            delete_checkpoint=delete_checkpoint,
            save_before_preemption=save_before_preemption,
            grace_seconds=grace_seconds,
            config=dict(config or {}),
        )
        self._fits = 0  # finished fits, also those whose backups are deleted: a restarted run must count the same
        # The storage and the model of each finished fit whose backups are not deleted.
        self._finished: list[tuple[Storage, weakref.ref[keras.Model]]] = []
        self._progress: progress.Progress | None = None
        self.training_id = ""
        self._chiefs_seed = ""  # the text of the argument of `restore_seed`

    backup_dir = property(operator.attrgetter("options.backup_dir"))
    save_freq = property(operator.attrgetter("options.save_freq"))
    save_every_seconds = property(operator.attrgetter("options.save_every_seconds"))
    keep = property(operator.attrgetter("options.keep"))
    delete_checkpoint = property(operator.attrgetter("options.delete_checkpoint"))
    preemption = property(operator.attrgetter("options.preemption"))

    @contextlib.contextmanager
    def training(
        self,
        model: keras.Model,
        ranks: Ranks,
        arguments: Mapping[str, Any],
        engine: Engine,
        task: str,
    ) -> Iterator[BackupSession]:
        """Backs up the `fit` within the context, and resumes an interrupted fit. The Trainer's loop calls the yielded session. A collective.

        `arguments` are the arguments of `fit` that must be the same in the run that resumes. Raises ConfigError if the folder cannot be used or
        holds backups of another training, and BackupError if no backup is complete or a backup cannot be read.
        """
        next_folder = os.path.join(self.backup_dir, f"fit-{self._fits + 2}")
        folder = os.path.join(self.backup_dir, f"fit-{self._fits + 1}") if self._fits else self.backup_dir
        self._progress = self._progress or progress.Progress(task)
        if ranks.is_chief:
            self._remove_postponed(folder)  # backups of an earlier training of these tasks, whose model is saved
        storage = Storage(folder, ranks.rank, ranks.size)
        session = BackupSession(self.options, storage, model, ranks, arguments, engine, self._progress, next_folder)
        try:
            session.find_backup()
        except (ConfigError, BackupError):
            progress.mark_refusal()
            session.release()
            raise
        self.training_id = session.training
        if self.preemption:
            self.preemption.listen()
            self.preemption.training = True
        try:
            yield session
            self._finished.append((session.storage, weakref.ref(model)))
            self._fits += 1
        finally:
            if self.preemption:
                self.preemption.training = False
                self.preemption.give_back()
            session.release()

    def delete(self, at_once: bool = False) -> None:
        """Removes the backups of finished trainings, unless `delete_checkpoint=False`.

        Args:
            at_once: True removes them now; if a supervisor then restarts the tasks, they train again. False leaves them to a supervisor,
                which removes them after all tasks have succeeded. Without a supervisor they are removed now in both cases.
        """
        if self.delete_checkpoint:
            self._remove([storage for storage, _ in self._finished], at_once)
            self._finished = []
            if at_once:
                self._remove_postponed(self.backup_dir)

    def delete_of(self, model: keras.Model) -> None:
        """Removes the backups of finished trainings of one model, unless `delete_checkpoint=False`.

        Not a collective: the chief removes the files of all ranks, and other ranks remove no files. So a rank that saves alone
        does not wait for the others and does not damage a backup.
        """
        if not self.delete_checkpoint:
            return
        saved = [storage for storage, trained in self._finished if trained() is model]
        self._finished = [(storage, trained) for storage, trained in self._finished if trained() is not model]
        self._remove(saved, of_all=True)

    def _remove(self, storages: Sequence[Storage], at_once: bool = False, of_all: bool = False) -> None:
        """Removes this rank's files (`of_all`: the chief removes all ranks' files), or leaves them to a supervisor, if one runs."""
        for storage in reversed(storages):
            if not at_once and late_removal.put_off(storage.folder, storage.rank):
                continue
            if storage.rank == 0 or not of_all:
                progress.note_backup(storage.folder, exists=False)
                storage.remove_all(every_rank=of_all or (storage.rank == 0 and progress.is_supervised()))
            if self._progress:
                self._progress.write(saved=0)

    def _remove_postponed(self, folder: str) -> None:
        """Removes now, in a folder and below it, the backups that this run has left to its supervisor."""
        for path in late_removal.take_back(folder):
            progress.note_backup(path, exists=False)
            Storage(path, 0, 1).remove_all(every_rank=True)

    def restore_seed(self, chiefs: str = "") -> None:
        """Sets TensorFlow's random seed to that of the backup that `fit` will resume. Without a backup, sets a random seed if no seed is set.

        Call it before you create datasets, because a dataset that shuffles reads the seed when it is created. A seed that you set later applies.

        Args:
            chiefs: The text of the chief's `saved_seed()`: a number, or "None". By default this process reads the backup.
        """
        self._chiefs_seed = chiefs or str(self.saved_seed())
        seed = None if self._chiefs_seed == "None" else int(self._chiefs_seed)
        if seed is None and tf_internals.global_seed() is None:
            seed = int.from_bytes(os.urandom(4), "little") >> 1
        if seed is not None and seed != tf_internals.global_seed():
            tf.random.set_seed(seed)

    def resumes(self) -> bool:
        """Returns whether the first `fit` of this program will resume from a backup."""
        return (self._chiefs_seed or str(self.saved_seed())) != "None"

    def saved_seed(self) -> int | None:
        """Returns the seed of the newest backup that this process sees; None without a backup."""
        return None if late_removal.is_put_off(self.backup_dir) else read_seed(self.backup_dir)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raises ConfigError: only Keras' own loop calls this; a Trainer removes the callback from the list that its loop calls."""
        raise ConfigError(
            "tfdist.BackupAndRestore needs the Trainer: call tfdist.Trainer(...).fit instead of model.fit."
        )


def _type_faults(backup_dir: Any, seconds: Mapping[str, Any], switches: Mapping[str, Any]) -> Iterator[str]:
    """Yields the errors in the types of the arguments and in the name of the folder."""
    if not isinstance(backup_dir, (str, os.PathLike)) or not isinstance(os.fspath(backup_dir), str):
        yield f"backup_dir must be a text or a path. Received: {format_value(backup_dir)}."
    elif not is_url(backup_dir):
        yield from folder_faults("backup_dir", os.fspath(backup_dir))
    for name, value in seconds.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            yield f"{name} must be a number of seconds. Received: {format_value(value)}."
    for name, value in switches.items():
        if value not in (True, False):
            yield f"{name} must be True or False. Received: {format_value(value)}."
