"""Files and folders at local paths and at fsspec URLs (`s3://`, `gs://`, `memory://`) by the same functions. No TensorFlow here.

Local paths go to the operating system, which names the cause of an error. URLs go to fsspec, which is imported at the first URL. Options and
credentials of a URL's storage come from the environment (`AWS_*`, `FSSPEC_*`) or fsspec's files, never from tfdist's configuration.
All functions raise OSError. For a URL it is one of three:

- FileNotFoundError: the file, the folder or the bucket does not exist. `NotADirectoryError` is possible, too.
- PassingError: the storage does not answer now, or does not permit it (DeniedError); it may later.
- StorageError: any other error.

Object stores have no folders: a folder exists while it has files. They write a file completely or not at all, as `write` and `upload` do
everywhere. `rename` copies and deletes there, one file after the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tfdist.errors import format_value
from tfdist.runtime.files import read_file, write_file
from tfdist.runtime.log import logger

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_S3 = ("s3", "s3a")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*\Z")
_PASSWORD = re.compile(r"(?<=://)[^\s/@'\"]*:[^\s@'\"]*(?=@)")  # secrets contain slashes
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]+")
_NO_CREDENTIALS = re.compile("Credentials|TokenRetrieval|SSOToken|ProfileNotFound|RefreshError")  # in a type's name
_UNSUPPORTED = (NotImplementedError, TypeError, ValueError, AttributeError, ImportError)
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds between attempts
_LARGEST = 1 << 40

T = TypeVar("T")


class StorageError(OSError):
    """A file or folder at a URL cannot be used."""


class PassingError(StorageError):
    """A file or folder at a URL cannot be used now: an error of the server or the network, a time-out, or a missing permission."""


class DeniedError(PassingError):
    """The storage does not permit it, or there are no credentials; another attempt a few seconds later is not expected to succeed."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, which fsspec reads and writes."""
    return "://" in os.fspath(path)


def shown(text: str) -> str:
    """Returns a URL, or a message that contains URLs, without passwords and parameters."""
    return _QUERY.sub(r"\1?...", _PASSWORD.sub("...", text))


def faults(argument: str, url: str) -> Iterator[str]:
    """Yields the reasons why a URL cannot be used, without a connection; none for a local path. `argument` names the option in them."""
    if not is_url(url):
        return
    scheme, _, rest = url.partition("://")
    if _PASSWORD.search(url) or _QUERY.search(url):
        yield (
            f"{argument} must not contain credentials or parameters, because it appears in logs. Received: {format_value(shown(url))}. Set "
            "the variables of the storage, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_... of fsspec, instead."
        )
    elif not _SCHEME.match(scheme):
        yield f"{argument} must be a path or one URL, such as s3://bucket/folder. Received: {format_value(url)}."
    elif not rest.strip("/"):
        yield f"{argument} must name a bucket or a folder, such as {scheme}://bucket/folder. Received: {format_value(url)}."
    else:
        from fsspec.registry import get_filesystem_class, known_implementations

        try:
            get_filesystem_class(scheme)
        except ImportError as e:
            extra = _EXTRAS.get(scheme)
            remedy = f"pip install 'tfdist[{extra}]'" if extra else known_implementations[scheme].get("err", str(e))
            yield f"{argument} {format_value(url)} needs a package that is not installed: {remedy}."
        except ValueError:
            known = ", ".join(f"{name}://" for name in ("s3", "gs", "memory"))
            yield f"{argument} {format_value(url)} has the unknown scheme {scheme!r}. Known are {known} and fsspec's other file systems."


def list_folder(path: str) -> list[str]:
    """Returns the names in a folder, without slashes at the end."""
    if not is_url(path):
        return os.listdir(path)
    with access(path, "be listed") as (fs, inner):
        entries = fs.ls(inner, detail=True)
        names = [
            entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if not _is_same(entry["name"], inner)
        ]
        if not names and any(e["type"] == "file" and not e["name"].endswith("/") for e in entries):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), shown(path))
        return names


def exists(path: str) -> bool:
    """Returns whether a file or a folder exists."""
    return _kind(path) is not None


def is_folder(path: str) -> bool:
    """Returns whether a folder exists; at an object store, whether files are below it."""
    return _kind(path) == "directory"


def is_file(path: str) -> bool:
    """Returns whether a file exists."""
    return _kind(path) == "file"


def size(path: str) -> int:
    """Returns the size of a file in bytes."""
    if not is_url(path):
        return os.stat(path).st_size
    with access(path, "be read") as (fs, inner):
        return int(fs.info(inner)["size"])


def modified(path: str) -> int:
    """Returns the time of a file's last change in nanoseconds since 1970; 0 if the storage does not know it."""
    if not is_url(path):
        return os.stat(path).st_mtime_ns
    with access(path, "be read") as (fs, inner):
        try:
            return int(fs.modified(inner).timestamp() * 1e9)
        except NotImplementedError:
            return 0


def read(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file. For a local file without a limit of its size use `open`."""
    path = os.fspath(path)
    if not is_url(path):
        return read_file(path, _LARGEST)
    with access(path, "be read") as (fs, inner):
        return bytes(fs.cat_file(inner))


def write(path: str, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one. Creates the folder at a URL, not a local one."""
    if not is_url(path):
        return write_file(path, content)
    with _writing(path) as (fs, inner):
        fs.pipe_file(inner, content)


def upload(local: str, url: str) -> None:
    """Copies a local file to a URL, so that a reader sees all of it or nothing."""
    os.stat(local)  # an error of the local file is not one of the URL
    with _writing(url) as (fs, inner):
        fs.put_file(local, inner)


def download(url: str, local: str) -> None:
    """Copies a file from a URL to a local path. Its errors of the local disk have an `errno`."""
    with open(local, "wb"):
        pass  # an error of the local file is not one of the URL
    with access(url, "be read", local=local) as (fs, inner):
        fs.get_file(inner, local)


def rename(old: str, new: str) -> None:
    """Renames a file or a folder. Replaces a file; a folder must not exist under the new name."""
    if not is_url(old):
        return os.replace(old, new)
    with access(old, "be renamed") as (fs, inner), access(new, "be written") as (_, target):
        if not _is_object_store(old):
            return fs.mv(inner, target)
        # Each file by itself: `mv` of a folder also copies folders, which are no files there.
        paths = [path for path in fs.find(inner) if not path.endswith("/")]
        if not paths:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown(old))
        for path in paths:
            fs.cp_file(path, target + path[len(inner.rstrip("/")) :])
        fs.rm(inner, recursive=True)


def remove(path: str) -> None:
    """Removes a file, if it exists."""
    try:
        if not is_url(path):
            return os.unlink(path)
        with access(path, "be removed") as (fs, inner):
            fs.rm_file(inner)
    except FileNotFoundError:
        pass


def remove_tree(path: str) -> None:
    """Removes a folder and its content; for a link, removes only the link."""
    if not is_url(path):
        return os.unlink(path) if os.path.islink(path) else shutil.rmtree(path)
    with access(path, "be removed") as (fs, inner):
        fs.rm(inner, recursive=True)


def make_folder(path: str) -> None:
    """Creates a folder and its parents, unless it exists. Does nothing at an object store, which has no folders."""
    if not is_url(path):
        os.makedirs(path, exist_ok=True)
    elif not _is_object_store(path):
        with access(path, "be created") as (fs, inner):
            fs.makedirs(inner, exist_ok=True)


def with_retries(
    work: Callable[[], T],
    pauses: Sequence[float] | None = None,
    stop: threading.Event | None = None,
    passing: tuple[type[Exception], ...] = (PassingError,),
) -> T:
    """Calls `work`; after an error that may pass calls it again, after each of the pauses. A DeniedError is final.

    Args:
        work: The function; it may be called several times.
        pauses: The pauses in seconds; None means four, 15 s in all.
        stop: Once it is set, there are no further attempts.
        passing: The types of errors after which it is called again.

    Raises:
        PassingError: The last attempt failed, too; or another type of `passing`.
    """
    pauses = PAUSES if pauses is None else pauses
    for number, pause in enumerate(pauses):
        try:
            return work()
        except passing as e:
            if isinstance(e, DeniedError) or (stop and stop.is_set()):
                raise
            if number == 0:
                logger.info(f"{e}; trying again for {sum(pauses):g} s")
            if (stop or threading.Event()).wait(pause):
                raise
    return work()


def _kind(path: str) -> str | None:
    try:
        if not is_url(path):
            return "directory" if stat.S_ISDIR(os.stat(path).st_mode) else "file"
        with access(path, "be read") as (fs, inner):
            return str(fs.info(inner)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_object_store(url: str) -> bool:
    return url.partition("://")[0] in _OBJECT_STORES


def _is_same(name: str, path: str) -> bool:
    return name.strip("/") == path.strip("/")


@contextlib.contextmanager
def access(url: str, purpose: str, local: str = "") -> Iterator[tuple[Any, str]]:
    """Yields the file system of a URL and the path in it; translates its errors. `purpose` completes "... cannot"."""
    try:
        from fsspec.core import url_to_fs

        # fsspec keeps the object, once for each process: after a fork, the child gets its own.
        fs, inner = url_to_fs(url, **_options(url))
        yield fs, inner
    except (FileNotFoundError, NotADirectoryError) as e:
        reason = _reason(e)
        number = e.errno or errno.ENOENT
        if "bucket does not" not in reason:
            reason = os.strerror(number)
        raise type(e)(number, reason, shown(url)) from None
    except StorageError:
        raise
    except Exception as e:
        raise _translated(url, purpose, e, local) from None  # the causes' messages may contain credentials


def _options(url: str) -> dict[str, Any]:
    """Returns the options of a URL's file system; those of the environment and of fsspec's files take precedence."""
    from fsspec.config import conf

    if not _is_object_store(url):
        return {}
    # Only object stores keep listings, which would hide what other tasks have written; other file systems do not know the option.
    options: dict[str, Any] = {"use_listings_cache": False}
    given = "AWS_MAX_ATTEMPTS" in os.environ or any("config_kwargs" in conf.get(name, {}) for name in _S3)
    if url.startswith(tuple(f"{name}://" for name in _S3)) and not given:
        # By default a call takes 10 s to fail, too long for the grace period after SIGTERM; `with_retries` tries again where it matters.
        options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    return options


@contextlib.contextmanager
def _writing(url: str) -> Iterator[tuple[Any, str]]:
    """Yields the file system of a URL and the path to write to, which is renamed at the end if the storage does not write atomically."""
    with access(url, "be written") as (fs, inner):
        try:
            if _is_object_store(url):
                yield fs, inner
                return
            fs.makedirs(inner.rpartition("/")[0], exist_ok=True)
            yield fs, f"{inner}.partial"
            fs.mv(f"{inner}.partial", inner)
        except FileNotFoundError as e:
            raise StorageError(f"{shown(url)} cannot be written: {_reason(e)}") from None


def _translated(url: str, purpose: str, error: Exception, local: str) -> OSError:
    if local and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return OSError(error.errno, os.strerror(error.errno), local)
    text = f"{shown(url)} cannot {purpose}: "
    if isinstance(error, _UNSUPPORTED):
        return StorageError(text + (next(faults("the path", url), "") or _reason(error)))
    if isinstance(error, PermissionError):
        return DeniedError(f"{text}no permission ({_reason(error)})")
    if _NO_CREDENTIALS.search(type(error).__name__):
        return DeniedError(
            f"{text}no credentials ({_reason(error)}). Set the variables of the storage, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return PassingError(text + _reason(error))


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, LookupError):  # of the client, which misses a field
        text = f"its answer has no {text}"
    return shown(text.splitlines()[0].rstrip("."))


def list_files(folder: str) -> dict[str, int]:
    """Returns the sizes in bytes of all files below a folder at a URL, by their path in it; empty if the folder does not exist."""
    try:
        with access(folder, "be listed") as (fs, inner):
            found: dict[str, Any] = fs.find(inner, detail=True)
    except FileNotFoundError:
        return {}
    start = len(inner.strip("/")) + 1
    return {
        name.strip("/")[start:]: int(entry["size"] or 0)
        for name, entry in found.items()
        if not name.endswith("/") and not _is_same(name, inner)
    }


def reason(error: BaseException) -> str:
    """Returns why a URL cannot be used, as a sentence without a full stop; its message has no credentials."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return _reason(error)
