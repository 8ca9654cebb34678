"""Finds the newest whole backup, the same on all ranks."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.backup.save_point import BEFORE_ALL, SavePoint
from tfdist.backup.storage import SHARED, CorruptBackupError, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.log import logger

FORMAT = 1
_SHARED_WITHIN = 30.0  # seconds in which a file of the chief's shows on the other tasks


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What one backup holds.

    Attributes:
        step: The steps done by then.
        epoch_ended: Whether the epoch of the last step had ended, too.
        manifest: What describes it.
        shared: Tensors that all ranks share, by name.
        own: Tensors of this rank alone, by name.
    """

    step: int
    epoch_ended: bool
    manifest: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]

    @property
    def point(self) -> SavePoint:
        """When it was taken."""
        return SavePoint(self.step, self.epoch_ended)


def find_backup(storage: Storage, ranks: Ranks, replicas: int) -> Snapshot | None:
    """Reads the newest whole backup. A collective.

    Args:
        storage: Where to look.
        ranks: This rank and the others.
        replicas: The number of replicas over all ranks.

    Returns:
        The backup, or None if there has never been one.

    Raises:
        ConfigError: The folder cannot be used, or a backup is of another cluster.
        BackupError: There have been backups, and none is whole.
    """
    _check_folder(storage, ranks)
    points, completed = storage.points(), storage.completed()
    found: Snapshot | None = None
    torn: list[str] = []
    while found is None and (point := _of_chief(ranks, points.pop(0) if points else BEFORE_ALL)) != BEFORE_ALL:
        why = ""
        try:
            if point not in completed:
                raise CorruptBackupError(f"{storage.path(point)} was not finished")
            manifest = storage.read_manifest(point)
            _check_cluster(storage, point, manifest, ranks.size, replicas)
            copy = Snapshot(*point, manifest, storage.read_part(point, SHARED), storage.read_part(point, storage.part))
        except CorruptBackupError as e:
            why = str(e)
        if not ranks.any(bool(why)):
            found = copy
        elif why:
            torn.append(why)
            if ranks.is_chief or point in completed:
                logger.warning(f"{why}; trying the backup before it")
    if found is None and ranks.any(bool(completed)):
        raise BackupError(
            f"{storage.folder!r} holds backups, but none is whole: {'; '.join(torn) or 'another task says why'}. "
            "To train from the beginning, remove that folder."
        )
    return found


def read_seed(folder: str) -> int | None:
    """Returns the random seed of the newest backup in a folder that can be read, or None."""
    storage = Storage(folder, 0, 1)
    for point in storage.points():
        try:
            return storage.read_manifest(point)["seed"]
        except CorruptBackupError:
            pass
    return None


def _of_chief(ranks: Ranks, mine: SavePoint) -> SavePoint:
    step, epoch_ended = ranks.gather(*mine)[0]
    return SavePoint(int(step), bool(epoch_ended))


def _check_folder(storage: Storage, ranks: Ranks) -> None:
    """Finds out whether all tasks can write there, and see what the chief writes."""
    folder = storage.folder
    chiefs, mine = (os.path.join(folder, f"rank-{rank}.probe") for rank in (0, ranks.rank))
    why = ""
    try:
        tf.io.gfile.makedirs(folder)
        with tf.io.gfile.GFile(mine, "w") as file:
            file.write("x")
    except (tf.errors.OpError, OSError) as e:
        why = f"backup_dir {folder!r} cannot be written to: {str(e).splitlines()[0]}. Is there room, and the right to?"
    ranks.barrier()
    deadline = time.monotonic() + _SHARED_WITHIN
    while not why and not tf.io.gfile.exists(chiefs):
        if time.monotonic() > deadline:
            why = (
                f"backup_dir {folder!r} must be a folder that all tasks share, but the chief's files do not show here."
            )
        time.sleep(0.1)
    failed = ranks.any(bool(why))
    if tf.io.gfile.exists(mine):
        tf.io.gfile.remove(mine)
    if failed:
        raise ConfigError(why or f"backup_dir {folder!r} cannot be used by another task; its own message says why.")


def _check_cluster(storage: Storage, point: SavePoint, manifest: Mapping[str, Any], tasks: int, replicas: int) -> None:
    remedy = f"or, to train from the beginning, remove {storage.folder!r} or choose another backup_dir."
    path, then = storage.path(point), (manifest.get("tasks"), manifest.get("replicas"))
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"The backup {path} was written by another version of tfdist. Go on with that one; {remedy}")
    if then != (tasks, replicas):
        raise ConfigError(
            f"The backup {path} was made with tasks: {then[0]}, replicas: {then[1]}; this run has tasks: {tasks}, replicas: {replicas}. "
            f"Start as many as before (another number cannot go on yet); {remedy}"
        )
