"""The writer of the snapshots of one `fit`. Each rank writes its part; the chief also writes the shared part and the manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.backup import files, unshared
from tfdist.backup.contents import SavePoint
from tfdist.backup.files import ReadError, first_line
from tfdist.backup.search import Snapshot
from tfdist.backup.storage import SHARED, Storage, part_of, remove_damaged, set_damaged_aside
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime import late_removal, mirror, ownership, progress
from tfdist.runtime import storage as urls
from tfdist.runtime.log import logger
from tfdist.runtime.ownership import Ownership


class SnapshotWriter:
    """Writes snapshots to a folder that this run owns, one at a time in a thread, and reports each to the supervisor.

    A local folder that cannot be written to ends the training. A failed upload to a URL does not: the ranks agree on it before the next
    snapshot (`settle`), which is then tried.

    Attributes:
        storage: The backups.
        saved: The point of the newest snapshot written; None before the first.
    """

    def __init__(self, storage: Storage, ranks: Ranks, keep: int, task_progress: progress.Progress):
        self.storage = storage
        self._ranks = ranks
        self._keep = keep
        self._progress = task_progress
        self._ownership = OwnershipMarker(storage.folder)
        self._is_local = files.is_local(storage.folder)
        self.thread = WriterThread()
        self.saved: SavePoint | None = None
        # Of the snapshot that is being uploaded, or that could not be uploaded last:
        self._uploading: SavePoint | None = None
        self._failed: SavePoint | None = None
        self._why = ""  # this rank's error
        self._given_up = ""  # the error of another rank, for which the chief does not wait
        self._hurry = threading.Event()  # a newer snapshot waits: no further attempts

    def check_free(self) -> None:
        """Raises ConfigError if a live run on the chief's host owns the folder, or it is not writable. A collective."""
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.check_free()
            except ConfigError as e:
                why = str(e)
            except OSError as e:
                why = f"backup_dir {self.storage.folder!r} cannot be written to: {first_line(e)}. Is there space, and permission to write?"
        if fault := self._ranks.agree(why):
            raise ConfigError(fault)

    def take_folder(self, after: SavePoint) -> None:
        """Takes ownership of the folder, moves damaged backups later than `after` aside, and removes this rank's unfinished ones.

        A collective. Raises BackupError if the folder cannot be changed.

        Args:
            after: The backup from which the run continues, or `BEFORE_ALL`.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._ownership.acquire()
                set_damaged_aside(self.storage, after)
            except (OSError, ReadError) as e:
                why = first_line(e)
        if reason := self._ranks.agree(why):
            raise BackupError(
                f"backup_dir {self.storage.folder!r} cannot be taken over: {reason}. Is there space, and permission to write?"
            )
        self.storage.clean(after)
        if not self.storage.is_shared:
            unshared.remove_stale(self.storage, self._ranks)
        self._ranks.barrier()

    def start(self, snapshot: Snapshot, is_last: bool = False) -> None:
        """Begins to write a snapshot in the thread, unless it is the newest already. Call `settle` before. A collective.

        `is_last` says that no newer snapshot follows: the caller reports a failure.
        """
        if (point := snapshot.point) == self.saved:  # equal on all ranks, so all of them return
            return
        if self._is_local:
            # The main thread gathers, because a step's collectives run in it.
            is_shared = self.storage.is_shared
            parts = {self._ranks.rank: snapshot.own} if is_shared else unshared.gather_parts(self._ranks, snapshot.own)
            self.thread.start(lambda: self._write(snapshot, parts))
            return
        self._why, self._given_up, self._uploading = "", "", point
        self._hurry.clear()
        if point == self._failed and (left := self._ranks.agree(self._remove_failed(point))):
            self._why = left
            if not is_last:
                self._report(point)
            return
        self.thread.start(lambda: self._upload(snapshot, is_last))

    def settle(self, is_last: bool = False) -> str:
        """Waits until all ranks have written the snapshot or have failed. A collective.

        Args:
            is_last: Whether no newer snapshot follows: a failed upload is tried again for some seconds.

        Returns:
            Why the snapshot could not be uploaded on any rank; empty if it could. A local folder raises the error instead.
        """
        point, self._uploading = self._uploading, None
        if point is None:
            self.thread.finish()
            return ""
        if not is_last:
            self._hurry.set()
        # The chief waits for the other ranks' parts in its thread: first they say whether a part will not come.
        if not self._ranks.is_chief:
            self.thread.finish()
        reason = self._ranks.agree("" if self._ranks.is_chief else self._why)
        if self._ranks.is_chief:
            self._given_up = reason
            self.thread.finish()
        reason = reason or self._ranks.agree(self._why)
        self._failed = point if reason else None
        if not reason:
            self.saved = point
        return reason

    def _upload(self, snapshot: Snapshot, is_last: bool) -> None:
        try:
            self._write(snapshot, {self._ranks.rank: snapshot.own})
        except BackupError as e:
            self._why = str(e).rstrip(".")
            if not is_last:
                self._report(snapshot.point)

    def _report(self, point: SavePoint) -> None:
        if self._ranks.is_chief:
            newest = f"the newest backup is {self.saved.folder}" if self.saved else "there is no backup yet"
            logger.warning(
                f"the backup {point.folder} could not be uploaded: {self._why}. The training continues; {newest}; the next one will be tried."
            )
        else:
            logger.warning(f"this task's part of the backup {point.folder} could not be uploaded: {self._why}")

    def _remove_failed(self, point: SavePoint) -> str:
        """Removes what this rank has uploaded of a backup that failed, so that parts of two attempts do not mix; returns why it cannot."""
        try:
            self.storage.remove(point)
            return ""
        except (OSError, ReadError) as e:
            return first_line(e)

    def _write(self, snapshot: Snapshot, parts: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes a snapshot's parts, given by rank; the chief also writes the shared part. Raises ConfigError if another run has taken the folder over."""
        storage, point = self.storage, snapshot.point
        if self._ranks.is_chief:
            self._ownership.check()
        mirror.settle()  # so that logs of the steps before the backup are not lost with this host
        for rank, own in parts.items():
            storage.write_part(point, part_of(rank), own, self._hurry)
        if self._ranks.is_chief:
            storage.write_part(point, SHARED, snapshot.shared, self._hurry)
            self._ownership.check()  # check again: only the manifest makes the parts a backup
            storage.write_manifest(point, snapshot.manifest, self._keep, self._hurry, lambda: self._given_up)
            remove_damaged(storage.folder)
            progress.note_backup(storage.folder)
            late_removal.keep(storage.folder)
            self._progress.write(saved=point.step)
        if not self._ranks.is_chief or not self._is_local:  # a failed upload may have left files of the chief
            self._clean()
        if self._is_local:
            self.saved = point

    def _clean(self) -> None:
        try:
            self.storage.clean()
        except urls.StorageError as e:
            logger.warning(f"{e}; files of unfinished backups remain until the next backup")

    def finish(self) -> None:
        """Waits until all ranks have written, removes backups beyond `keep`, and releases the folder. A collective."""
        self._ranks.barrier()
        self._clean()
        self.release()

    def release(self) -> None:
        """Releases the folder if this run owns it."""
        if self._ranks.is_chief:
            self._ownership.release()


class OwnershipMarker(Ownership):
    """A run's ownership of a backup folder, local or at a URL. The chief uses it.

    Remote folders have no locks, and some file systems do not lock across hosts. There the run that started last owns the folder,
    and an earlier one stops at its next backup. So a run that was presumed dead and restarted elsewhere does no damage when it
    wakes up. The supervisor does not restart a run that lost the folder, because it would take the folder back.
    """

    def __init__(self, folder: str):
        super().__init__(folder, "backup_dir")
        self._is_local = files.is_local(folder)

    def check_free(self) -> None:
        if self._is_local:
            os.makedirs(self._folder, exist_ok=True)
        super().check_free()

    def check(self) -> None:
        """Raises ConfigError if another run has taken the folder over since `acquire`."""
        owner = self.owner()
        if owner not in (None, ownership.this_run()):
            progress.mark_refusal()
            raise ConfigError(
                f"backup_dir {self._folder!r} was taken over by a newer run: {owner}. This run stops, so that the two do not "
                "overwrite each other's backups. Give each run its own backup_dir."
            )

    def acquire(self) -> None:
        if self._is_local:
            super().acquire()
        else:
            urls.write(self._path, ownership.this_run().encode())

    def owner(self) -> str | None:
        if self._is_local:
            return super().owner()
        try:
            return files.read(self._path).decode(errors="replace") or None
        except ReadError:  # no marker, or it is unreadable
            return None

    def release(self) -> None:
        super().release()
        if not self._is_local and self.owner() == ownership.this_run():
            urls.remove(self._path)

    def _try_lock(self) -> bool:
        return super()._try_lock() if self._is_local else not ownership.is_alive(self.owner() or "")


class WriterThread:
    """A thread that writes one backup at a time; the main thread raises its error later, in `check` or `finish`.

    It is a daemon thread, which does not keep the process alive: a task whose peers have died must not wait for their files.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in a new thread. Earlier work must have finished."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="backup", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the work has ended or failed, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self) -> None:
        """Waits until the work has ended, and raises its error, if any."""
        self.wait()
        self._thread = None
        self.check()

    def check(self) -> None:
        """Raises the error of failed work, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = e
