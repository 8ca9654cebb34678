"""The late removal of a finished training's backups: once all tasks of a supervised run have succeeded. No TensorFlow here.

Saving a model removes the backups of its training. Under a supervisor the task only records the folder: after a restart the tasks find the
backups, and do not repeat finished training. The supervisor removes the backups when its run has succeeded. A run that trains several
models in one folder, one after the other, removes backups at once: after a restart the first training would resume the last one's backups.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable

from tfdist.errors import ConfigError
from tfdist.runtime import progress, storage
from tfdist.runtime.files import read_file, write_error_reason, write_file
from tfdist.runtime.ownership import Ownership

# Suffixes of notes by the current tasks, and by the tasks before a restart. A new training in the folder replaces the current tasks'
# backups, and resumes the earlier tasks' backups.
_NOW, _BEFORE = ".saved", ".saved-before"
_LISTS = ("checkpoint", "checkpoint.partial")  # the files that list a folder's backups
_BACKUPS = ("step-", "damaged-")  # prefixes of the backups' folders


def put_off(backup_dir: str, rank: int) -> bool:
    """Leaves the backups of a finished training to the supervisor.

    Args:
        backup_dir: The folder. It must be local, because the supervisor does not reach remote folders.
        rank: This task's rank. The chief records the folder for all tasks.

    Returns:
        Whether the supervisor will remove them; False if the task must do so now.
    """
    note = progress.backup_note(backup_dir)
    if note is None or storage.is_url(backup_dir) or _with(note, progress.REUSED).exists():
        return False
    if rank == 0:
        path = os.path.abspath(backup_dir)
        try:
            write_file(_with(note, _NOW), json.dumps([path, _names(path)]).encode())
            _with(note, _BEFORE).unlink(missing_ok=True)
        except OSError:
            return False
    return True


def is_put_off(backup_dir: str) -> bool:
    """Returns whether the current tasks have left a folder's backups to the supervisor."""
    note = progress.backup_note(backup_dir)
    return bool(note and _with(note, _NOW).exists())


def take_back(backup_dir: str) -> list[str]:
    """Withdraws the notes of `backup_dir` and its subfolders; returns these folders, whose backups the caller must remove."""
    note = progress.backup_note(backup_dir)
    if note is None or storage.is_url(backup_dir):
        return []
    top, folders = os.path.abspath(backup_dir), []
    for path in note.parent.glob(f"*{_NOW}"):
        folder, _ = _read(path)
        if folder == top or folder.startswith(os.path.join(top, "")):
            path.unlink(missing_ok=True)
            folders.append(folder)
    return sorted(folders, reverse=True)


def keep(backup_dir: str) -> None:
    """Removes the notes of a folder, which now has a backup of a further training, so that the supervisor does not remove it."""
    if note := progress.backup_note(backup_dir):
        for suffix in (_NOW, _BEFORE):
            _with(note, suffix).unlink(missing_ok=True)


def begin(folder: str | os.PathLike[str]) -> None:
    """Marks the notes in the supervisor's folder as notes of the tasks before a restart.

    Raises:
        OSError: A note cannot be renamed.
    """
    for path in pathlib.Path(folder).glob(f"*{_NOW}"):
        path.rename(path.with_suffix(_BEFORE))


def noted(folder: str | os.PathLike[str]) -> list[tuple[str, list[str]]]:
    """Returns the folders that were left to the supervisor, subfolders first, each with the names of its backups."""
    notes = [path for suffix in (_NOW, _BEFORE) for path in pathlib.Path(folder).glob(f"*{suffix}")]
    return sorted((note for note in map(_read, notes) if note[0]), reverse=True)


def remove_all_noted(folder: str | os.PathLike[str], say: Callable[[str], object]) -> None:
    """Removes the backups of finished trainings. Tasks do not remove them, because a restart might still need them.

    Args:
        folder: The folder with the notes of the tasks.
        say: Called with a message for each folder of backups that cannot be removed.
    """
    for backup_dir, names in noted(folder):
        try:
            remove_noted(backup_dir, names)
        except OSError as e:
            say(
                f"the backups in {backup_dir} cannot be removed, though the model is saved: {write_error_reason(e)}. Remove them, or the "
                "next training there continues from them"
            )


def remove_noted(backup_dir: str, names: list[str]) -> None:
    """Removes the backups in a note, unless another run uses their folder, or has added backups since.

    Args:
        backup_dir: The folder.
        names: The names of the folder's backups when it was recorded.

    Raises:
        OSError: The backups cannot be removed.
    """
    with contextlib.suppress(ConfigError, FileNotFoundError), Ownership(backup_dir, "backup_dir"):
        if set(names).issuperset(_names(backup_dir)):
            remove_backups(backup_dir)
    with contextlib.suppress(OSError):  # the folder has other files, or its parent belongs to another user
        os.rmdir(backup_dir)


def remove_backups(backup_dir: str | os.PathLike[str]) -> None:
    """Removes all backups in a folder. A partly removed backup, as after `kill -9`, counts as removed.

    Raises:
        OSError: The backups cannot be removed.
    """
    if storage.is_url(backup_dir):
        url = os.fspath(backup_dir)
        for name in storage.list_folder(url):
            if name in _LISTS:
                storage.remove(os.path.join(url, name))
            elif name.startswith(_BACKUPS):
                storage.remove(os.path.join(url, name, "manifest.json"))
                storage.remove_tree(os.path.join(url, name))
        return
    folder = pathlib.Path(backup_dir)
    for name in _LISTS:
        (folder / name).unlink(missing_ok=True)
    for path in [path for path in folder.iterdir() if path.name.startswith(_BACKUPS)]:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            continue
        with contextlib.suppress(FileNotFoundError):
            (path / "manifest.json").rename(path / "removed")
        shutil.rmtree(path)


def _names(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(_BACKUPS[0]))


def _with(note: pathlib.Path, suffix: str) -> pathlib.Path:
    return note.with_name(note.name + suffix)


def _read(note: pathlib.Path) -> tuple[str, list[str]]:
    """Returns the content of a note; an empty path if it is incomplete."""
    try:
        folder, names = json.loads(read_file(note))
    except (OSError, ValueError):
        return "", []
    return folder, names
