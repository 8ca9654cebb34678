"""Writes the snapshots of one `fit`: each rank its part, the chief the shared part and the manifest."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backup import damaged
from tfdist.backup.files import ReadError, first_line
from tfdist.backup.ownership import OwnershipMarker
from tfdist.backup.save_point import SavePoint
from tfdist.backup.search import Snapshot
from tfdist.backup.storage import SHARED, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.progress import Progress, note_backup


class SnapshotWriter:
    """Writes snapshots to a folder that it owns.

    Args:
        storage: The folder.
        ranks: The ranks.
        keep: How many backups to keep.
        progress: What the supervisor is told of the last backup.

    Attributes:
        saved: When the newest backup was taken, or None.
    """

    def __init__(self, storage: Storage, ranks: Ranks, keep: int, progress: Progress):
        self._storage = storage
        self._ranks = ranks
        self._keep = keep
        self._progress = progress
        self._ownership = OwnershipMarker(storage.folder)
        self.saved: SavePoint | None = None

    def check_free(self) -> None:
        """Makes sure that no other run of the chief's host has the folder. A collective.

        Raises:
            ConfigError: One has.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.check_free()
            except ConfigError as e:
                why = str(e)
        if self._ranks.any(bool(why)):
            folder = self._storage.folder
            raise ConfigError(why or f"backup_dir {folder!r} cannot be used by the chief; its own message says why.")

    def take_folder(self, after: SavePoint) -> None:
        """Takes the folder over from other runs, sets damaged later backups aside, and removes this rank's unfinished ones. A collective.

        Args:
            after: When the backup was taken that the run goes on from, or `BEFORE_ALL`.

        Raises:
            BackupError: The folder cannot be changed.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.acquire()
                damaged.set_aside(self._storage, after)
            except (OSError, tf.errors.OpError, ReadError) as e:
                why = f"backup_dir {self._storage.folder!r} cannot be taken over: {first_line(e)}. Is there room, and the right to?"
        if self._ranks.any(bool(why)):
            raise BackupError(
                why or f"The chief cannot use backup_dir {self._storage.folder!r}; its own message says why."
            )
        self._storage.clean(after)
        self._ranks.barrier()

    def write(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, unless it is there already.

        Raises:
            ConfigError: Another run has taken the folder over.
        """
        if (point := snapshot.point) == self.saved:  # the same on all ranks
            return
        storage = self._storage
        if self._ranks.is_chief:
            self._ownership.check()
        storage.write_part(point, storage.part, snapshot.own)
        if self._ranks.is_chief:
            storage.write_part(point, SHARED, snapshot.shared)
            self._ownership.check()
            storage.write_manifest(point, snapshot.manifest, self._keep)
            damaged.remove(storage.folder)
            note_backup(storage.folder)
            self._progress.write(saved=snapshot.step)
        else:
            storage.clean()
        self.saved = point

    def finish(self) -> None:
        """Removes backups beyond `keep`, once all ranks have written, and gives the folder back."""
        self._ranks.barrier()
        self._storage.clean()
        self.release()

    def release(self) -> None:
        """Gives the folder back, if it is this run's."""
        if self._ranks.is_chief:
            self._ownership.release()
