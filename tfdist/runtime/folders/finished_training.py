"""The end of a training: its backups are removed once its model is saved. No TensorFlow here.

A launcher may restart the tasks after the save: they then need the backups, in order not to train again. So under a launcher the save
writes a file `finished` beside the backups, with the name of the launcher's run. A restart of that run resumes, and trains nothing. Every
other run removes the backups, and starts from the beginning. The launcher removes them if all tasks succeed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from tfdist.errors import ConfigError
from tfdist.runtime.files import write_error_reason
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.claim import JOB, Claim, read_name, this_run
from tfdist.runtime.report import progress

_FILE = "finished"
_LISTS = ("checkpoint", "checkpoint.partial")  # the files that list a folder's backups
_BACKUPS = ("step-", "damaged-")  # prefixes of the backups' folders


def finish(backup_dir: str, at_once: bool = False) -> bool:
    """Removes the backups of a training whose model is saved; under a launcher, leaves them for a restart, unless `at_once`.

    Returns:
        Whether they are removed.
    """
    job = os.environ.get(JOB)
    # The launcher removes only backups that it knows, and a full disk may have kept each former note from it.
    if job and not at_once and progress.note_backup(backup_dir):
        try:
            storage.write(os.path.join(backup_dir, _FILE), job.encode())
            return False
        except OSError:  # such as a full disk: without the mark a restart must not find the backups
            pass
    progress.note_backup(backup_dir, exists=False)
    remove_backups(backup_dir)
    return True


def is_of_another_run(backup_dir: str) -> bool:
    """Returns whether a folder has the backups of another run's finished training.

    Raises:
        OSError: The folder cannot be read.
    """
    return _read(backup_dir) not in (None, os.environ.get(JOB))


def resume(backup_dir: str) -> None:
    """Removes the mark of a finished training: the folder's backups are those of a training that runs."""
    storage.remove(os.path.join(backup_dir, _FILE))


def remove_of_this_run(backup_dirs: Iterable[str], say: Callable[[str], object]) -> None:
    """Removes the backups of this launcher's finished trainings, unless another run uses their folder.

    Args:
        backup_dirs: The folders.
        say: Called with a message for each folder of backups that cannot be removed.
    """
    for folder in sorted(backup_dirs, reverse=True):  # subfolders first
        try:
            if _read(folder) == this_run():
                try:
                    with Claim(folder, "backup_dir"):
                        remove_backups(folder)
                except ConfigError:  # another run uses the folder
                    pass
                remove_if_empty(folder)
        except OSError as e:
            say(
                f"the backups in {storage.shown(folder)} cannot be removed, though the model is saved: {write_error_reason(e)}. Remove them; "
                "otherwise the next training there does"
            )


def remove_backups(backup_dir: str) -> None:
    """Removes all backups in a folder, and the folder if it is empty then. A partly removed backup, as after `kill -9`, counts as removed.

    Raises:
        OSError: The backups cannot be removed.
    """
    for name in _LISTS:
        storage.remove(os.path.join(backup_dir, name))
    try:
        for name in storage.list_folder(backup_dir):
            if name.startswith(_BACKUPS):
                _remove_backup(os.path.join(backup_dir, name))
    except FileNotFoundError:  # the folder does not exist
        pass
    resume(backup_dir)  # last: a run that was killed before has left backups that the next run must remove
    remove_if_empty(backup_dir)


def _remove_backup(path: str) -> None:
    if os.path.islink(path) or storage.is_file(path):
        storage.remove(path)
        return
    try:
        # Without a manifest it is no backup, even if this process is killed before the rest is removed.
        storage.rename(os.path.join(path, "manifest.json"), os.path.join(path, "removed"))
    except FileNotFoundError:  # an unfinished backup
        pass
    while storage.exists(path):
        try:
            storage.remove_tree(path)
        except FileNotFoundError:  # another task removes files of unfinished backups
            pass


def remove_if_empty(folder: str) -> None:
    """Removes a folder without files, if that is possible: it may be a volume, or in another user's folder."""
    try:
        if not storage.is_url(folder):
            os.rmdir(folder)
        elif not storage.list_folder(folder):
            storage.remove_tree(folder)
    except OSError:  # it has files, or may not be removed
        pass


def _read(backup_dir: str) -> str | None:
    """Returns the name of the run that has finished the training in a folder; None if none has."""
    try:
        return read_name(os.path.join(backup_dir, _FILE))
    except (FileNotFoundError, NotADirectoryError):
        return None
