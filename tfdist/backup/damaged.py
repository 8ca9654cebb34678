"""Damaged backups, which a run does not go on from: renamed until the next backup is complete, and removed then. On the chief."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.backup import files
from tfdist.runtime.log import logger

if TYPE_CHECKING:
    from tfdist.backup.save_point import SavePoint
    from tfdist.backup.storage import Storage

_PREFIX = "damaged-"


def set_aside(storage: Storage, after: SavePoint) -> None:
    """Renames the backups after the one that a run goes on from, so that no new one is written into their folders.

    Those that were never complete are left to `Storage.clean`.

    Args:
        storage: The backups.
        after: The backup that the run goes on from.

    Raises:
        OSError: One cannot be renamed.
        OpError: One cannot be renamed.
        UnreadableBackupError: The folder cannot be read.
    """
    completed = storage.completed()
    for point in storage.points():
        if point > after and (point in completed or not storage.is_unfinished(point)):
            names, number, new = {*files.list_folder(storage.folder)}, 1, _PREFIX + point.folder
            while new in names or f"{new}/" in names:
                number, new = number + 1, f"{_PREFIX}{point.folder}-{number + 1}"
            tf.io.gfile.rename(storage.path(point), os.path.join(storage.folder, new))


def remove(folder: str) -> None:
    """Removes what `set_aside` has renamed; what cannot be removed is left, with a warning.

    Args:
        folder: The folder of the backups.
    """
    path = folder
    try:
        for name in files.list_folder(folder):
            if name.startswith(_PREFIX):
                path = os.path.join(folder, name.rstrip("/"))
                files.remove_tree(path)
    except (OSError, tf.errors.OpError, files.ReadError) as e:
        logger.warning(f"damaged backups are left, as {path} cannot be removed: {files.first_line(e)}")
