"""`BackupAndRestore`: an interrupted training run resumes as if it had not been interrupted.

A backup is captured between two steps and written while the next steps run. A run that finds a backup builds the model and then restores
all state: variables, each replica's own values, the state of callbacks, the position in the data.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
from tfdist.engine import Engine
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.folders import finished_training
from tfdist.runtime.folders.storage import is_url
from tfdist.runtime.report import progress
from tfdist.verify import settings as verify_settings

# The number of the last fit of this program whose model is saved, by backup_dir: a later training, also of another Trainer, has another folder.
saved_fits: dict[str, int] = {}


class BackupAndRestore(BackupOptions, keras.callbacks.Callback):
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
        backup_dir: The folder, as a text. The other arguments are attributes, too.
        training_id: On the chief, the identifier of the last `fit` in its backups; empty before the first `fit`.

    Examples:
        >>> import tempfile, tfdist
        >>> backup = tfdist.BackupAndRestore(tempfile.mkdtemp(), save_freq=100)
        >>> trainer = tfdist.Trainer("mirrored", backup=backup)
        >>> backup.save_freq
        100
    """

    backup_dir: str

    def __post_init__(self) -> None:
        verified = verify_settings.current()
        if verified:  # the user's own backups stay as they are
            self.backup_dir = verified.backup_folder(self.backup_dir)
            self.save_freq = verified.save_freq or self.save_freq
        super().__post_init__()
        keras.callbacks.Callback.__init__(self)
        self._fits = 0  # finished fits, also those whose backups are deleted: a restarted run must count the same
        # The storage and the model of each finished fit whose backups are not deleted, by its number.
        self._finished: dict[int, tuple[Storage, weakref.ref[keras.Model]]] = {}
        self.training_id = ""
        self._chiefs_seed = ""  # the text of the argument of `restore_seed`

    @contextlib.contextmanager
    def training(
        self,
        model: keras.Model,
        ranks: Ranks,
        arguments: Mapping[str, Any],
        engine: Engine,
    ) -> Iterator[BackupSession]:
        """Backs up the `fit` within the context, and resumes an interrupted fit. The Trainer's loop calls the yielded session. A collective.

        `arguments` are the arguments of `fit` that must be the same in the run that resumes. Raises ConfigError if the folder cannot be used or
        holds backups of another training, and BackupError if no backup is complete or a backup cannot be read.
        """
        # The chief's number, because only its process may have saved the last model.
        number = int(ranks.broadcast_scalar(self._next_fit))
        storage = Storage(self._folder_of(number), ranks.rank, ranks.size)
        next_folder = self._folder_of(number + 1)
        session = BackupSession(self, storage, model, ranks, arguments, engine, next_folder)
        try:
            session.find_backup()
        except (ConfigError, BackupError):
            progress.write(refused=True)
            session.release()
            raise
        self.training_id = session.training
        if self.preemption:
            self.preemption.listen()
            self.preemption.training = True
        try:
            yield session
            self._finished[number] = session.storage, weakref.ref(model)
            self._fits = number
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
        self._finish([*self._finished], at_once)

    def delete_of(self, model: keras.Model) -> None:
        """Removes the backups of finished trainings of one model, unless `delete_checkpoint=False`.

        Not a collective: the chief removes the files of all ranks, and other ranks remove no files. So a rank that saves alone
        does not wait for the others and does not damage a backup.
        """
        self._finish([number for number, (_, trained) in self._finished.items() if trained() is model])

    def _finish(self, numbers: Sequence[int], at_once: bool = False) -> None:
        if not self.delete_checkpoint:
            return
        # The folders of later fits are in that of the first one, which can be removed once they are gone.
        for number in reversed(numbers):
            storage, _ = self._finished[number]
            if storage.rank == 0 and finished_training.finish(storage.folder, at_once):
                del self._finished[number]
                progress.write(saved=0)
            # Each rank does so: if the tasks do not share the folder, each has an empty one of its own.
            finished_training.remove_if_empty(storage.folder)
            finished_training.remove_if_empty(self.backup_dir)
            saved_fits[self._key] = max(number, saved_fits.get(self._key, 0))

    @property
    def _key(self) -> str:
        return self.backup_dir if is_url(self.backup_dir) else os.path.abspath(self.backup_dir)

    @property
    def _next_fit(self) -> int:
        return max(self._fits, saved_fits.get(self._key, 0)) + 1

    def _folder_of(self, number: int) -> str:
        """Returns the folder of the backups of a fit of this program, from 1."""
        if number == 1:
            return self.backup_dir
        return os.path.join(self.backup_dir, f"fit-{number}")

    def restore_seed(self, chiefs: str = "") -> None:
        """Sets TensorFlow's random seed to that of the backup that `fit` will resume. Without a backup, sets a random seed if no seed is set.

        Call it before you create datasets, because a dataset that shuffles reads the seed when it is created. A seed that you set later applies.

        Args:
            chiefs: The text of the chief's `saved_seed()`: a number, or "None". By default this process reads the backup.
        """
        self._chiefs_seed = chiefs or str(self.saved_seed())
        seed = None if self._chiefs_seed == "None" else int(self._chiefs_seed)
        if seed is None and tf_internals.global_seed() is None:
            seed = secrets.randbits(31)
        if seed is not None and seed != tf_internals.global_seed():
            tf.random.set_seed(seed)

    def resumes(self) -> bool:
        """Returns whether the first `fit` of this program will resume from a backup."""
        return (self._chiefs_seed or str(self.saved_seed())) != "None"

    def saved_seed(self) -> int | None:
        """Returns the seed of the newest backup that this process sees; None without a backup."""
        folder = self._folder_of(self._next_fit)
        try:
            if not finished_training.is_of_another_run(folder):
                return read_seed(folder)
        except OSError:  # `fit` will raise
            pass
        return None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raises ConfigError: only Keras' own loop calls this; a Trainer removes the callback from the list that its loop calls."""
        raise ConfigError(
            "tfdist.BackupAndRestore needs the Trainer: call tfdist.Trainer(...).fit instead of model.fit."
        )
