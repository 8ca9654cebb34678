"""A folder on shared storage through which processes of one user exchange small files. No TensorFlow here.

Files of other users are not read, and links are not followed. This user's id is the owner of a file that this process has written to the
folder, because network storage may show other user ids than the hosts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import stat
import time
import uuid

from tfdist.runtime.files import open_regular

_TRIES = 20
_OURS = re.compile(r"\d+|list|\.(\d+|list)\.[0-9a-f]{32}")  # names of the files in the folder


class SharedFolder:
    """A shared folder, created when the first file is written."""

    def __init__(self, place: pathlib.Path):
        self.place = place
        self._owner: int | None = None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file atomically: readers see it complete or not yet.

        Raises:
            OSError: The file cannot be written, or the folder is a link or another user's.
        """
        for attempt in range(_TRIES):
            try:
                return self._write(name, content)
            except FileNotFoundError:  # another process has just removed the folder
                if attempt == _TRIES - 1:
                    raise
                time.sleep(0.05)

    def _write(self, name: str, content: bytes) -> None:
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(self.place)
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, "it is a link, and should be a folder", str(self.place))
        partial = self.place / f".{name}.{uuid.uuid4().hex}"
        try:
            # O_EXCL follows no link.
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                self._owner = os.fstat(descriptor).st_uid
                if status.st_uid != self._owner:
                    raise OSError(errno.EPERM, "the folder belongs to another user", str(self.place))
                file.write(content)
            partial.replace(self.place / name)
        finally:
            partial.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            OSError: The file cannot be read, or is a link, a named pipe or another user's.
        """
        with open_regular(self.place / name) as file:
            if os.fstat(file.fileno()).st_uid != self._owner:
                raise OSError(errno.EPERM, "it belongs to another user", str(self.place / name))
            return file.read()

    def names(self) -> set[str]:
        """Returns the names of the files; listing also makes network storage look for new files."""
        try:
            return set(os.listdir(self.place))
        except OSError:
            return set()

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        (self.place / name).unlink(missing_ok=True)

    def rmdir(self) -> None:
        """Removes the folder.

        Raises:
            OSError: The folder is not empty.
        """
        self.place.rmdir()


def remove_old(folder: pathlib.Path, prefix: str, seconds: float) -> None:
    """Removes this user's subfolders whose names begin with `prefix`, unchanged for `seconds`, that contain only files of an exchange."""
    with contextlib.suppress(OSError):
        for subfolder in folder.iterdir():
            with contextlib.suppress(OSError):
                status = os.lstat(subfolder)
                is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if not is_own or not subfolder.name.startswith(prefix) or time.time() - status.st_mtime < seconds:
                    continue
                names = os.listdir(subfolder)
                if all(map(_OURS.fullmatch, names)):
                    for name in names:
                        (subfolder / name).unlink()
                    subfolder.rmdir()
