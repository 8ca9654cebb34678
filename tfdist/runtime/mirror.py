"""Local folders whose files a thread uploads to a URL, for files that grow, such as logs. No TensorFlow here.

Object stores cannot append to a file, and other programs open local files. So the files of a run are written to a temporary folder, a
mirror; a thread uploads those that have changed. A launcher's tasks write to the launcher's mirror, which outlives them. Every other
process has its own mirror. It removes a file at the URL only after this process has removed its local copy.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pathlib
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from tfdist import errors
from tfdist.errors import ConfigError, list_first
from tfdist.runtime import ownership, process_end, progress, storage
from tfdist.runtime.files import WriteError
from tfdist.runtime.log import logger
from tfdist.runtime.temporary import temporary_folder

LAUNCHERS = "TFDIST_MIRROR"  # set for tasks: the URL and the folder of their launcher's mirror, as JSON

_EVERY = 5.0  # seconds between two uploads
_MOST_LOAD = 0.1  # share of the time that uploads may take
_LOOK_EVERY = 0.1  # seconds between two searches for requests
_HARD_END_SECONDS = 2.0  # limit for the uploads before an end without Python's shutdown
_SETTLES_WITHIN = 20.0  # limit in seconds for a backup's wait for the uploads
_PATIENCE = 30.0  # seconds without an upload, after which the end no longer waits
_PAUSES_AT_END = (1.0, 2.0, 4.0)
_ENDING_SECONDS = 5.0  # to wait for a run of this host that is ending
_SMALL = (
    4096  # bytes; a smaller file is compared by content, because a write through a memory map may not change its time
)
_UNFINISHED = re.compile(r"\.partial|^cut-\d+$")  # in a file's name
_REQUESTS = "requests"
_FILES = "files"
_mirrors: dict[str, Mirror] = {}


class Mirror:
    """A local folder and the thread that uploads its files; `opened` creates it.

    Args:
        url: The folder at a URL.
        what: The option that names the folder, for errors.
        wanted: Takes the path of a file in the folder, and returns whether to download it at the start. Files that are not wanted
            are neither downloaded nor removed.
        owns: Whether no other run may write there: the newest run owns the folder.

    Attributes:
        url: The folder at a URL.
        folder: The local folder.

    Raises:
        ConfigError: The folder at the URL cannot be read or written, or a live run on this host owns it.
    """

    def __init__(self, url: str, what: str, wanted: Callable[[str], bool], owns: bool):
        self.url, self._what = url, what
        self._uploaded: dict[str, object] = {}  # the state of each file when it was uploaded or downloaded, by its path
        self._uploads = 0
        self._failure = ""
        self._abandoned = False
        self._end = threading.Event()
        self._owner = Owner(url, what) if owns else None
        self._stack = contextlib.ExitStack()
        root = pathlib.Path(self._stack.enter_context(temporary_folder()))
        self.folder = root / _FILES
        self._copy, self._requests = root / "copy", root / _REQUESTS
        self.folder.mkdir()
        self._requests.mkdir()
        try:
            if self._owner:
                self._owner.take()
            storage.with_retries(lambda: self._download(wanted))
        except OSError as e:
            self._stack.close()
            raise ConfigError(f"{what} must be a folder that can be read and written: {storage.reason(e)}.") from None
        except BaseException:
            self._stack.close()
            raise
        errors.shown_paths[str(self.folder)] = url
        self._thread = threading.Thread(target=self._run, name="tfdist-mirror", daemon=True)
        self._thread.start()

    def for_tasks(self) -> dict[str, str]:
        """Returns the environment of tasks that write to this mirror."""
        return {LAUNCHERS: json.dumps([self.url, str(self.folder)])}

    def close(self) -> None:
        """Uploads changed files, warns about files that cannot be uploaded, and removes the local folder."""
        if self._end.is_set():
            return
        self._end.set()
        uploads = -1
        while self._thread.is_alive() and self._uploads > uploads:  # a server may accept connections and never answer
            uploads = self._uploads
            self._thread.join(_PATIENCE)
        self._abandoned = True
        if left := sorted(path for path, state in self._states().items() if self._uploaded.get(path) != state):
            self._failure = self._failure or f"no answer within {_PATIENCE:g} s"
            logger.warning(f"not uploaded to {self.url}: {list_first(left, 5)}. The last error: {self._failure}")
        _mirrors.pop(self.url, None)
        self._stack.close()

    def _download(self, wanted: Callable[[str], bool]) -> None:
        for path in filter(wanted, storage.list_files(self.url)):
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another task has removed it
                storage.download(f"{self.url}/{path}", str(target))
                self._uploaded[path] = _state(target)

    def _run(self) -> None:
        due = time.monotonic() + _EVERY
        while not self._end.wait(_LOOK_EVERY):
            requests = os.listdir(self._requests)
            if not requests and time.monotonic() < due:
                continue
            began = time.monotonic()
            self._upload()
            for request in requests:
                with contextlib.suppress(OSError):
                    os.unlink(self._requests / request)
            took = time.monotonic() - began
            due = time.monotonic() + max(_EVERY, took / _MOST_LOAD)
        for pause in (*_PAUSES_AT_END, 0.0):
            if self._upload():
                break
            time.sleep(pause)
        else:
            return
        if self._owner:
            with contextlib.suppress(OSError):
                self._owner.release()

    def _upload(self) -> bool:
        """Uploads changed files, and removes files that were removed here; returns whether all of it succeeded."""
        failure = ""
        states = self._states()
        if self._abandoned:  # the folder is being removed, and the files at the URL stay
            return False
        try:
            if self._owner:
                self._owner.check()
            for path, state in states.items():
                if self._uploaded.get(path) != state:
                    with contextlib.suppress(FileNotFoundError):  # it has been removed since
                        shutil.copyfile(self.folder / path, self._copy)  # the file may grow during the upload
                        storage.upload(str(self._copy), f"{self.url}/{path}")
                        self._uploaded[path] = state
                        self._uploads += 1
            for path in self._uploaded.keys() - states.keys():
                storage.remove(f"{self.url}/{path}")
                del self._uploaded[path]
        except (OSError, ConfigError) as e:
            failure = f"{storage.reason(e)}."
        if failure and not self._failure:
            logger.warning(f"logs are not uploaded now: {failure} Training continues, and uploads are tried again.")
        elif self._failure and not failure:
            logger.info(f"logs are uploaded to {self.url} again")
        self._failure = failure
        return not failure

    def _states(self) -> dict[str, object]:
        states = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = pathlib.Path(folder, name)
                if not _UNFINISHED.search(name):
                    with contextlib.suppress(FileNotFoundError):
                        states[path.relative_to(self.folder).as_posix()] = _state(path)
        return states


class Owner:
    """The name of the run that owns a folder at a URL, in a file there.

    Object stores have no locks. So the run that started last owns the folder, and an earlier one stops writing there.

    Args:
        url: The folder.
        what: The option that names the folder, for errors.
    """

    def __init__(self, url: str, what: str):
        self._url, self._what = url, what
        self._path = f"{url}/{ownership.FILE}"

    def take(self) -> None:
        """Writes the name of this run.

        Raises:
            ConfigError: A live run on this host owns the folder.
            OSError: The name cannot be written.
        """
        deadline = time.monotonic() + _ENDING_SECONDS
        while (owner := self._read()) and ownership.is_alive(owner):
            if time.monotonic() > deadline:
                progress.mark_refusal()
                raise ConfigError(
                    f"{self._what} {self._url!r} belongs to another run, which has not ended: {owner}. Give each run its own "
                    f"{self._what}, or end that process first."
                )
            time.sleep(0.1)
        storage.with_retries(lambda: storage.write(self._path, ownership.this_run().encode()))

    def check(self) -> None:
        """Raises ConfigError if a newer run owns the folder, and OSError if that cannot be read."""
        owner = self._read()
        if owner not in ("", ownership.this_run(), os.environ.get(ownership.JOB)):
            progress.mark_refusal()
            raise ConfigError(
                f"{self._what} {self._url!r} was taken over by a newer run: {owner}. This run writes no more files there. Give each run its "
                f"own {self._what}."
            )

    def release(self) -> None:
        """Removes the name if it is this run's."""
        if self._read() == ownership.this_run():
            storage.remove(self._path)

    def _read(self) -> str:
        try:
            return storage.read(self._path).decode(errors="replace")
        except FileNotFoundError:
            return ""


def opened(url: str, what: str, wanted: Callable[[str], bool], owns: bool = False) -> Mirror:
    """Returns this process's mirror of a folder at a URL, and creates it if there is none. Arguments and errors are those of `Mirror`."""
    if url not in _mirrors:
        _mirrors[url] = Mirror(url, what, wanted, owns)
    return _mirrors[url]


def close(url: str) -> None:
    """Closes this process's mirror of a folder at a URL, if there is one."""
    if url in _mirrors:
        _mirrors[url].close()


def check_owner(url: str, what: str) -> None:
    """Raises ConfigError if a newer run owns the folder at a URL, and WriteError if that cannot be read."""
    try:
        storage.with_retries(Owner(url, what).check)
    except OSError as e:
        raise WriteError(f"{storage.reason(e)}. Fix the storage, and run the same command again.") from e


def settle() -> None:
    """Waits until all files that were written so far are uploaded, at most some seconds: a backup counts on them after a restart."""
    _settle([mirror.folder for mirror in _mirrors.values()] + list(filter(None, [launchers_folder()])), _SETTLES_WITHIN)


def _settle(folders: Sequence[pathlib.Path], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for folder in folders:
        request = os.path.join(folder.parent, _REQUESTS, uuid.uuid4().hex)
        try:
            os.close(os.open(request, os.O_CREAT | os.O_WRONLY, 0o600))
            while os.path.exists(request) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY / 2)
        except OSError:  # the folder has been removed, or the disk is full
            pass


def launchers_folder(url: str = "") -> pathlib.Path | None:
    """Returns the folder in which this task's launcher mirrors `url`, or the work directory if it is empty; None without one."""
    mirrored, folder = json.loads(os.environ.get(LAUNCHERS, '["", ""]'))
    if not folder or url not in ("", mirrored):
        return None
    errors.shown_paths[folder] = mirrored
    return pathlib.Path(folder)


def _state(path: pathlib.Path) -> object:
    status = path.stat()
    return path.read_bytes() if status.st_size <= _SMALL else (status.st_mtime_ns, status.st_size, status.st_ino)


def _close_all() -> None:
    for mirror in list(_mirrors.values()):
        mirror.close()


def _settle_at_hard_end() -> None:
    _settle([mirror.folder for mirror in _mirrors.values()], _HARD_END_SECONDS)


atexit.register(_close_all)
# Python's thread pools, on which fsspec depends, end before functions of `atexit` run; these functions run in reverse order.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
process_end.before_end.append(_settle_at_hard_end)
os.register_at_fork(after_in_child=_mirrors.clear)  # the folders and threads are the parent's
