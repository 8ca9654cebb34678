"""The folder of a run's files, on a disk or at a URL. No TensorFlow here."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist import errors
from tfdist.errors import ConfigError, format_value
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.claim import Claim
from tfdist.runtime.folders.uploads import UploadedFolder

_LAUNCHERS = "TFDIST_WORKDIR"  # set for tasks: the URL and the local folder of their launcher's logs, as JSON
_FILES = ("config.json", "model.keras", "summary.json")


class Workdir:
    """The work directory of a run; a path for `os.path.join`.

    Complete files are written to it directly. Files that grow are written to `logs`. For a URL this is a temporary folder, whose
    files are uploaded; the tasks of a launcher share the launcher's.

    Args:
        path: A local path, or a URL.

    Attributes:
        is_url: Whether it is at a URL.
        logs: The local folder of files that grow, such as curves; for a URL, only within `claim`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        text = os.fspath(path)
        self.is_url = storage.is_url(text)
        self._path = text.rstrip("/") if self.is_url else str(pathlib.Path(text))
        self.logs = pathlib.Path(self._path)
        self._claim = Claim(self._path, "workdir")
        self._uploads: UploadedFolder | None = None

    def __fspath__(self) -> str:
        return self._path

    __str__ = __fspath__

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Returns the object in a JSON file, by `read_json`."""
        return read_json(os.path.join(self, name))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file so that readers never see an incomplete file. Types that JSON does not have are written as strings.

        Raises:
            WriteError: The file cannot be written.
        """
        text = json.dumps(value, indent=2, default=str) + "\n"  # a task's options may be anything
        path = os.path.join(self, name)
        try:
            storage.make_folder(os.path.dirname(path))
            storage.with_retries(lambda: storage.write(path, text.encode()))
        except storage.StorageError as e:
            raise WriteError(
                f"{storage.reason(e)}. Fix the storage, and run the same command again, which continues from its backup."
            ) from e
        except OSError as e:
            raise WriteError(
                f"cannot write {path}: {write_error_reason(e)}. The old file is unchanged. Free the disk, and run the same command again, "
                "which continues from its backup."
            ) from e

    def local_path(self, url: str) -> str | None:
        """Returns the local path of a file below a work directory at a URL, and creates its folder; None for another URL."""
        if not self.is_url or not url.startswith(f"{self}/"):
            return None
        path = os.path.join(self.logs, url.removeprefix(f"{self}/"))
        os.makedirs(os.path.dirname(path.partition("{")[0]), exist_ok=True)
        return path

    def check_shared(self) -> None:
        """Raises ConfigError if only this process can read the work directory."""
        if self._path.startswith("memory://"):
            raise ConfigError(
                f"workdir {format_value(self._path)} exists in one process only: give a URL that all tasks reach."
            )

    def check_owner(self) -> None:
        """Raises ConfigError if a newer run owns the URL."""
        if self.is_url:
            self._claim.check()

    def for_tasks(self) -> dict[str, str]:
        """Returns the environment of tasks that write to this launcher's `logs`."""
        return {_LAUNCHERS: json.dumps([self._path, str(self.logs)])} if self.is_url else {}

    def upload(self) -> None:
        """Begins to upload the changed logs to the URL; does nothing for a local folder, and in tasks whose logs another one uploads."""
        if self._uploads:
            self._uploads.upload()

    @contextlib.contextmanager
    def claim(self, is_owner: bool, evaluator: str = "") -> Iterator[None]:
        """Claims the work directory for this run within the context, and opens `logs`; at the end uploads them.

        Args:
            is_owner: Whether this process is the launcher or the chief, which claims it for all tasks.
            evaluator: The name of an evaluator's task, which shares the folder with the run that owns it; empty for other tasks.

        Raises:
            ConfigError: The work directory cannot be read or written, another run owns it, or it contains another user's link.
        """
        if self.is_url:
            with self._claim_url(is_owner):
                yield
        elif is_owner or evaluator:
            with self._claim_folder(Claim(self._path, "workdir", evaluator)):
                yield
        else:
            yield

    @contextlib.contextmanager
    def _claim_url(self, is_owner: bool) -> Iterator[None]:
        url, folder = json.loads(os.environ.get(_LAUNCHERS, '["", ""]'))
        if url == self._path:
            self.logs = pathlib.Path(folder)
            errors.shown_paths[folder] = url
            if is_owner:  # the launcher uploads at the end
                self._uploads = UploadedFolder(url, _is_log, self.logs, self._claim.check)
            yield
            return
        try:
            if is_owner:
                self._claim.lock()
                self._claim.take()
            check = self._claim.check if is_owner else lambda: None
            self._uploads = UploadedFolder(self._path, _is_log, check=check)
        except OSError as e:
            raise ConfigError(f"workdir must be a folder that can be read and written: {storage.reason(e)}.") from None
        self.logs = self._uploads.folder
        try:
            yield
        finally:
            self._uploads.finish()
            if is_owner:
                try:
                    self._claim.release()
                except OSError:  # the next run sees that the owner has ended
                    pass

    @contextlib.contextmanager
    def _claim_folder(self, claim: Claim) -> Iterator[None]:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._check_links()
            claim.lock()
        except ConfigError:
            raise
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise ConfigError(
                f"workdir must be a folder that can be written to. Received: {format_value(self._path)} ({why})."
            ) from None
        with claim:
            yield

    def _check_links(self) -> None:
        """Raises ConfigError if the folder has another user's link, or a folder in place of one of the run's files."""
        for path in filter(pathlib.Path.is_symlink, self.logs.iterdir()):
            user = path.lstat().st_uid
            if user not in (os.geteuid(), self.logs.stat().st_uid):
                raise ConfigError(
                    f"{format_value(str(path))} is a symbolic link of user {user}, through which the run would write elsewhere: remove it, or "
                    "choose another --workdir, in which no other user can write."
                )
        for path in map(self.logs.joinpath, _FILES):
            if path.is_dir():
                raise ConfigError(
                    f"{format_value(str(path))} must be a file of the run, and is a folder: remove it, or choose another --workdir."
                )


def read_json(path: str) -> dict[str, Any] | None:
    """Returns the object in a JSON file, an empty dict if the content is not an object, or None if the file cannot be read.

    Raises:
        ConfigError: The file is at a URL that cannot be read now, so whether it exists is unknown.
    """
    try:
        body = json.loads(storage.with_retries(lambda: storage.read(path)))
    except storage.StorageError as e:
        raise ConfigError(f"workdir must be a folder that can be read and written: {storage.reason(e)}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except (OSError, ValueError):  # such as a path with a null byte
        return None
    return body if isinstance(body, dict) else {}


def _is_log(path: str) -> bool:
    """Returns whether a file below a work directory is one that a continued run appends to."""
    return path.startswith(("tensorboard/", "logs/")) or path.endswith((".csv", ".jsonl", ".bin"))
