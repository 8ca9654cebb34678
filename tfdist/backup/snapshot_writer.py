"""The writer of the snapshots of one `fit`. Each rank writes its part; the chief also writes the shared part and the manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.backup import files, unshared
from tfdist.backup.contents import SHARED, SavePoint, part_of
from tfdist.backup.files import ReadError, first_line
from tfdist.backup.pieces import ServerError, ServerRows
from tfdist.backup.search import Snapshot
from tfdist.backup.storage import Storage, remove_damaged, set_damaged_aside
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.folders import finished_training
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.folders.claim import Claim
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress


class SnapshotWriter:
    """Writes snapshots to a folder that this run owns, one at a time in a thread, and reports each to the supervisor.

    A local folder that cannot be written to ends the training. A failed upload to a URL does not: the ranks agree on it before the next
    snapshot (`settle`), which is then tried.

    Attributes:
        storage: The backups.
        saved: The point of the newest snapshot written; None before the first.
    """

    def __init__(self, storage: Storage, ranks: Ranks, keep: int):
        self.storage = storage
        self._ranks = ranks
        self._keep = keep
        self._claim = Claim(storage.folder, "backup_dir")
        self._is_local = files.is_local(storage.folder)
        self.thread = WriterThread()
        self.saved: SavePoint | None = None
        # Of the snapshot that is being uploaded, or that could not be uploaded last:
        self._uploading: SavePoint | None = None
        self._failed: SavePoint | None = None
        self._why = ""  # this rank's error
        self._given_up = ""  # the error of another rank, for which the chief does not wait
        self._hurry = threading.Event()  # a newer snapshot waits: no further attempts

    def lock_folder(self) -> None:
        """Locks the folder, and removes the backups of another run's finished training. A collective.

        Raises ConfigError if a live run on the chief's host owns the folder, or it is not writable.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._claim.lock()
                urls.with_retries(self._remove_finished)
            except ConfigError as e:
                why = str(e)
            except OSError as e:
                why = f"backup_dir {self.storage.folder!r} cannot be written to: {first_line(e)}. Is there space, and permission to write?"
        fault = self._ranks.agree(why)
        if fault:
            raise ConfigError(fault)

    def _remove_finished(self) -> None:
        if finished_training.is_of_another_run(self.storage.folder):
            finished_training.remove_backups(self.storage.folder)

    def take_folder(self, after: SavePoint) -> None:
        """Takes the folder, moves damaged backups later than `after` aside, and removes this rank's unfinished ones.

        The run continues from `after`, which may be `BEFORE_ALL`. A collective. Raises BackupError if the folder cannot be changed.
        """
        why = ""
        if self._ranks.is_chief:
            try:
                self._claim.take()
                finished_training.resume(self.storage.folder)
                set_damaged_aside(self.storage, after)
            except (OSError, ReadError) as e:
                why = first_line(e)
        reason = self._ranks.agree(why)
        if reason:
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
        point = snapshot.point
        if point == self.saved:  # equal on all ranks, so all of them return
            return
        if self._is_local:
            parts: Mapping[int, Mapping[str, Any]] = {self._ranks.rank: snapshot.own}
            if not self.storage.is_shared:
                # The main thread gathers, because a step's collectives run in it.
                parts = unshared.gather_parts(self._ranks, snapshot.own)
            self.thread.start(lambda: self._write(snapshot, parts))
            self._wait_for_servers(snapshot)
            return
        self._why = ""
        self._given_up = ""
        self._uploading = point
        self._hurry.clear()
        if self._failed and not is_last:  # an outage: one attempt for each save
            self._hurry.set()
        if point == self._failed:
            self._why = self._ranks.agree(self._remove_failed(point))
        if not self._why:
            self.thread.start(lambda: self._upload(snapshot, is_last))
            self._wait_for_servers(snapshot)
        elif not is_last:
            self._report(point)

    def _wait_for_servers(self, snapshot: Snapshot) -> None:
        """Waits until a snapshot is written that has tables on servers: the next step would change their rows. Raises the error of a server."""
        if any(isinstance(value, ServerRows) for value in snapshot.shared.values()):
            try:
                self.thread.finish()
            except ServerError as e:
                assert e.__cause__ is not None  # noqa: S101 (for the type checker)
                raise e.__cause__ from None

    def settle(self, is_last: bool = False) -> str:
        """Waits until all ranks have written the snapshot or have failed. A collective.

        Returns why the snapshot could not be uploaded on any rank, or an empty text. A local folder raises the error instead.
        If no newer snapshot follows (`is_last`), a failed upload is tried again for some seconds.
        """
        point, self._uploading = self._uploading, None
        if point is None:
            self.thread.finish()
            return ""
        if not is_last:
            self._hurry.set()
        # The chief's thread waits for the other ranks' parts. So they finish first, and say whether a part will not come.
        why = ""
        if not self._ranks.is_chief:
            self.thread.finish()
            why = self._why
        reason = self._ranks.agree(why)
        if self._ranks.is_chief:
            self._given_up = reason
            self.thread.finish()
        reason = reason or self._ranks.agree(self._why)
        if reason:
            self._failed = point
        else:
            if self._failed and self._ranks.is_chief:
                logger.info(f"backups are uploaded to {self.storage.folder} again")
            self._failed = None
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
        """Warns of a failed upload, unless the one before it failed, too."""
        if self._failed:
            return
        if not self._ranks.is_chief:
            logger.warning(f"this task's part of the backup {point.folder} could not be uploaded: {self._why}")
            return
        newest = "there is no backup yet"
        if self.saved:
            newest = f"the newest backup is {self.saved.folder}"
        logger.warning(
            f"the backup {point.folder} could not be uploaded: {self._why}. The training continues; {newest}; the next one will be tried."
        )

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
            self._claim.check()
        for rank, own in parts.items():
            storage.write_part(point, part_of(rank), own, self._hurry)
        if self._ranks.is_chief:
            storage.write_part(point, SHARED, snapshot.shared, self._hurry)
            # Check again, because another run may have come meanwhile, and only the manifest makes the parts a backup.
            self._claim.check()
            storage.write_manifest(point, snapshot.manifest, self._keep, self._hurry, lambda: self._given_up)
            remove_damaged(storage.folder)
            progress.note_backup(storage.folder)
            progress.write(saved=point.step)
        # The other ranks remove their files of backups that the chief has removed. The chief has left files only if an upload failed.
        if not self._ranks.is_chief or not self._is_local:
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
            self._claim.release()


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
