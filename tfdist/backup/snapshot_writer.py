"""Writes the snapshots of one `fit`: each rank its part, the chief the shared part and the manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import tensorflow as tf

from tfdist.backup import files
from tfdist.backup.contents import SavePoint
from tfdist.backup.files import ReadError, first_line
from tfdist.backup.search import Snapshot
from tfdist.backup.storage import SHARED, Storage, remove_damaged, set_damaged_aside
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime import late_removal, ownership, progress
from tfdist.runtime.ownership import Ownership


class SnapshotWriter:
    """Writes snapshots to a folder that it owns, and reports the last to the supervisor. `saved` says when the newest was taken, or None."""

    def __init__(self, storage: Storage, ranks: Ranks, keep: int, task_progress: progress.Progress):
        self._storage = storage
        self._ranks = ranks
        self._keep = keep
        self._progress = task_progress
        self._ownership = OwnershipMarker(storage.folder)
        self.saved: SavePoint | None = None

    def check_free(self) -> None:
        """Raises ConfigError if another run of the chief's host has the folder. A collective."""
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.check_free()
            except ConfigError as e:
                why = str(e)
            except OSError as e:
                why = f"backup_dir {self._storage.folder!r} cannot be written to: {first_line(e)}. Is there room, and the right to?"
        if fault := self._ranks.agree(why):
            raise ConfigError(fault)

    def take_folder(self, after: SavePoint) -> None:
        """Takes the folder over from other runs, sets damaged later backups aside, and removes this rank's unfinished ones. A collective.

        The run continues from the backup `after`, or `BEFORE_ALL`. Raises BackupError where the folder cannot be changed.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.acquire()
                set_damaged_aside(self._storage, after)
            except (OSError, tf.errors.OpError, ReadError) as e:
                why = first_line(e)
        if reason := self._ranks.agree(why):
            raise BackupError(
                f"backup_dir {self._storage.folder!r} cannot be taken over: {reason}. Is there room, and the right to?"
            )
        self._storage.clean(after)
        self._ranks.barrier()

    def write(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, unless it is there already. Raises ConfigError if another run has taken the folder over."""
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
            remove_damaged(storage.folder)
            progress.note_backup(storage.folder)
            late_removal.keep(storage.folder)
            self._progress.write(saved=point.step)
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


class OwnershipMarker(Ownership):
    """A run's claim to a folder of backups, wherever TensorFlow reaches; for the chief.

    Remote folders have no locks, nor do all file systems lock across hosts. There the run that started last has the folder, and the
    other one stops at its next backup. So a run that was thought dead, and was started again elsewhere, does no harm when it wakes up.
    A supervisor does not restart a run that was denied the folder: it would take the folder back.
    """

    def __init__(self, folder: str):
        super().__init__(folder, "backup_dir")
        self._is_local = files.is_local(folder)

    def check_free(self) -> None:
        if self._is_local:
            os.makedirs(self._folder, exist_ok=True)
        super().check_free()

    def check(self) -> None:
        """Raises a ConfigError if another run has taken the folder over since."""
        owner = self.owner()
        if owner not in (None, ownership.this_run()):
            progress.mark_refusal()
            raise ConfigError(
                f"backup_dir {self._folder!r} is another run's, which began later: {owner}. This one ends, as two would "
                "spoil each other's backups. Give each run a backup_dir of its own."
            )

    def acquire(self) -> None:
        if self._is_local:
            super().acquire()
        else:
            files.replace(self._path, ownership.this_run())

    def owner(self) -> str | None:
        if self._is_local:
            return super().owner()
        try:
            return files.read(self._path).decode(errors="replace") or None
        except ReadError:  # it is not there, or cannot be told
            return None

    def release(self) -> None:
        super().release()
        if not self._is_local and self.owner() == ownership.this_run():
            tf.io.gfile.remove(self._path)

    def _try_lock(self) -> bool:
        return super()._try_lock() if self._is_local else not ownership.is_alive(self.owner() or "")


class WriterThread:
    """A thread that writes one backup at a time; its errors are raised again in the main thread, later.

    It does not keep the process from ending: a task whose peers have died must not wait for their files.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Starts some work; earlier work must have finished."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="backup", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the work has ended, well or not, or for some seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self) -> None:
        """Waits until the work has ended, and raises its error."""
        self.wait()
        self._thread = None
        self.check()

    def check(self) -> None:
        """Raises the work's error, if it has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = e
