"""Local folders whose files are uploaded to a URL, for files that grow, such as logs. No TensorFlow here.

Object stores cannot append to a file, and other programs write local files only. So a process writes its logs to a temporary folder, and
uploads the changed files at the end of each epoch and of the run.
"""

from __future__ import annotations

import pathlib
import stat
import threading
import time
from collections.abc import Callable, Mapping

from tfdist import errors
from tfdist.errors import ConfigError, list_first
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.log import logger

PAUSES_AT_END = (0.0, 1.0, 2.0, 4.0)  # seconds before the attempts


class UploadedFolder:
    """A local folder of the files at a URL. It removes a file at the URL only after this process's tasks have removed the local file.

    Args:
        url: The folder at a URL.
        is_wanted: Takes the path of a file in the folder, and returns whether to download it first.
        folder: The local folder, which another process has downloaded. None means a new temporary folder.
        check: Called before each upload. It raises ConfigError or OSError if this process must not upload now.

    Attributes:
        folder: The local folder.

    Raises:
        OSError: The folder at the URL cannot be read.
    """

    def __init__(
        self,
        url: str,
        is_wanted: Callable[[str], bool],
        folder: pathlib.Path | None = None,
        check: Callable[[], object] = lambda: None,
    ):
        self._url = url
        self._check = check
        self._uploaded: dict[str, object] = {}  # the state of each file when it was uploaded or downloaded, by its path
        self._failure = ""
        self._thread: threading.Thread | None = None
        self._temporary = temporary_folder()  # without this reference the folder would be removed
        self.folder = folder or pathlib.Path(self._temporary.__enter__())
        errors.shown_paths[str(self.folder)] = url
        if folder:
            # Upload them again: the other process may have failed to.
            self._uploaded = dict.fromkeys(self._files())
        else:
            storage.with_retries(lambda: self._download(is_wanted))

    def upload(self) -> None:
        """Begins to upload the changed files in a thread, unless the previous upload has not ended."""
        if self._thread is None or not self._thread.is_alive():
            # List them now: the thread must not take the removal of the folder at the exit for that of its files.
            self._thread = threading.Thread(target=self._upload, args=(self._files(),), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Uploads the changed files, and warns about those that cannot be uploaded."""
        if self._thread:
            self._thread.join()  # the storage's client limits its time
        for pause in PAUSES_AT_END:
            time.sleep(pause)
            files = self._files()
            self._upload(files)
            if not self._failure:
                return
        left = [path for path, state in files.items() if self._uploaded.get(path) != state]
        logger.warning(f"not uploaded to {self._url}: {list_first(left, 5)}. The last error: {self._failure}.")

    def _download(self, is_wanted: Callable[[str], bool]) -> None:
        for path in filter(is_wanted, storage.list_files(self._url)):
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                storage.download(f"{self._url}/{path}", str(target))
            except FileNotFoundError:  # another task has removed it
                pass
        self._uploaded = self._files()

    def _upload(self, files: Mapping[str, object]) -> None:
        why: str | None = None
        try:
            self._check()
            for path in files:
                if self._uploaded.get(path) != files[path]:
                    try:
                        content = (self.folder / path).read_bytes()  # the file may grow during the upload
                    except FileNotFoundError:  # it has been removed since
                        continue
                    storage.write(f"{self._url}/{path}", content)
                    self._uploaded[path] = files[path]
            for path in self._uploaded.keys() - files.keys():
                storage.remove(f"{self._url}/{path}")
                del self._uploaded[path]
        except (OSError, ConfigError) as e:
            why = storage.reason(e)
        if why and not self._failure:
            logger.warning(
                f"logs are not uploaded now: {why}. Training continues, and the next upload, at the end of an epoch, tries again."
            )
        elif self._failure and not why:
            logger.info(f"logs are uploaded to {self._url} again")
        self._failure = why or ""

    def _files(self) -> dict[str, object]:
        """Returns the time and size of each file in the folder, by its path in it."""
        files: dict[str, object] = {}
        for path in self.folder.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another task has removed it
                continue
            if stat.S_ISREG(status.st_mode):
                files[path.relative_to(self.folder).as_posix()] = (status.st_mtime_ns, status.st_size)
        return files
