"""Which backup a `fit` has: the Trainer's, a callback of tfdist's, or one in place of Keras' own callback."""

from __future__ import annotations

import os
from collections.abc import Sequence

import keras

from tfdist.backup.callback import BackupAndRestore
from tfdist.runtime.log import logger


def take_backup(
    callbacks: Sequence[keras.callbacks.Callback], default: BackupAndRestore | None
) -> tuple[BackupAndRestore | None, list[keras.callbacks.Callback], bool]:
    """Takes what backs up out of a list of callbacks.

    Args:
        callbacks: The user's.
        default: What backs up if none of them does, or None.

    Returns:
        What backs up, or None; the other callbacks; whether the backup is to be removed when `fit` ends, as Keras' is.
    """
    given = [each for each in callbacks if isinstance(each, BackupAndRestore)]
    of_keras = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    others = [each for each in callbacks if each not in (*given[:1], *of_keras)]
    backup = given[0] if given else default
    if not of_keras:
        return backup, others, False
    if backup is not None:
        logger.info(f"left keras.callbacks.BackupAndRestore out, as the training is backed up in {backup.backup_dir!r}")
        return backup, others, False
    keras_own = of_keras[0]
    folder = os.fspath(keras_own.backup_dir)
    logger.info(
        f"tfdist.BackupAndRestore({folder!r}) takes the place of keras.callbacks.BackupAndRestore, which repeats steps after a restart; "
        "a backup that Keras' has written is not read"
    )
    backup = BackupAndRestore(folder, keras_own.save_freq or "epoch", delete_checkpoint=keras_own.delete_checkpoint)
    return backup, others, keras_own.delete_checkpoint
