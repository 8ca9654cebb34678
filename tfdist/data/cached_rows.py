"""`CachedRows`: the rows that a map has computed, kept in memory or in files of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
import psutil

from tfdist.errors import DataError, format_value

logger = logging.getLogger("tfdist")

_KEY = re.compile(r"[0-9a-f]{32}")  # the name of a cache's folder
_WRITTEN = 1 << 32  # in an entry of the index, beside the checksum
_OF_FREE_SPACE, _OF_FREE_MEMORY = 0.9, 0.25
_REMOVED = re.compile(rf"{_KEY.pattern}\.removed")


class CachedRows:
    """The mapped rows of the first blocks, as many as the limit admits. Threads and processes may use the same files.

    A file holds one column, with a slot for each row. The index has an entry for each block, which is written after its rows
    and holds their checksum. So rows that a killed process left incomplete, or that are damaged, are computed again. Two
    processes that write the same block write the same bytes.

    Args:
        sizes: The number of rows in each block.
        row_bytes: The bytes of a row in each column.
        place: "memory", or a folder.
        key: The name of the folder for these rows in `place`.
        limit: The bytes of all caches in `place`; None means 90 % of the free space, or a quarter of the free memory.
    """

    def __init__(self, sizes: np.ndarray, row_bytes: Sequence[int], place: str, key: str, limit: int | None):
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._row_bytes, self._place, self._key, self._limit = row_bytes, place, key, limit
        self._valid = np.zeros(len(sizes), bool)
        self._first = random.Random()  # not the state of `random`, which is the program's
        self._columns = [np.zeros((0, size), np.uint8) for size in row_bytes]
        self._files: list[IO[bytes]] = []  # those of the columns, and the index
        self._lengths: list[int] = []
        self._index: np.ndarray | None = None
        self._lock = threading.Lock()
        self._has_stopped = False
        self._blocks = 0  # the blocks that may be stored
        self._is_damaged = False
        try:
            self._open_memory() if place == "memory" else self._open_folder()
        except (OSError, MemoryError) as e:
            self._stop(e)

    def missing(self, blocks: np.ndarray) -> np.ndarray:
        """Returns the blocks to compute and `put`, each once. Parallel readers begin with different ones."""
        unique = np.unique(blocks)
        unique = unique[unique < self._blocks]
        unique = unique[~self._valid[unique]]
        if self._index is not None and len(unique):
            unique = np.array([block for block in unique.tolist() if not self._verify(block)], np.int64)
        return np.roll(unique, self._first.randrange(len(unique))) if len(unique) else unique

    def has(self, blocks: np.ndarray) -> np.ndarray:
        """Returns for each block whether its rows can be taken."""
        return self._valid[blocks]

    def take(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes of rows, `[len(rows), row_bytes]`, for each column."""
        self._check_lengths()
        numbers = self._starts[blocks] + rows
        return [column.take(numbers, 0) for column in self._columns]  # in half the time of column[numbers]

    def put(self, block: int, columns: Sequence[np.ndarray]) -> None:
        """Stores the rows of a block. An error of the disk ends the filling of the cache with a warning."""
        begin, end = self._starts[block : block + 2].tolist()
        try:
            if self._index is None:
                for column, values in zip(self._columns, columns, strict=True):
                    column[begin:end] = _as_bytes(values)
            else:
                checksum = 0
                for file, values, size in zip(self._files[:-1], columns, self._row_bytes, strict=True):
                    stored = _as_bytes(values).data.cast("B") if size else b""
                    checksum = zlib.crc32(stored, checksum)
                    _write_at(file, stored, begin * size)
                _write_at(self._files[-1], np.array([_WRITTEN | checksum], "<u8").tobytes(), 8 * block)
        except OSError as e:
            self._stop(e)
        else:
            self._valid[block] = True

    def _verify(self, block: int) -> bool:
        """Returns whether the files hold the rows of a block."""
        self._check_lengths()
        entry = 0 if self._index is None else int(self._index[block])
        if not entry:
            return False
        begin, end = self._starts[block : block + 2].tolist()
        checksum = 0
        for column in self._columns:
            checksum = zlib.crc32(column[begin:end].data.cast("B") if column.size else b"", checksum)
        if entry == _WRITTEN | checksum:
            self._valid[block] = True
            return True
        if not self._is_damaged:
            self._is_damaged = True
            logger.warning(
                "The cache in %s is damaged: its damaged rows are computed again. Check the disk if this message returns.",
                self._folder,
            )
        return False

    @property
    def _folder(self) -> str:
        return os.path.join(self._place, self._key)

    def _check_lengths(self) -> None:
        """Raises DataError if a file has been truncated: beyond its end, the memory map would end the process."""
        for file, length in zip(self._files, self._lengths, strict=True):
            if os.fstat(file.fileno()).st_size < length:
                raise DataError(f"{self._folder} was truncated while it was in use. Start the training again.")

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._blocks = 0
            if self._has_stopped:
                return
            self._has_stopped = True
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        logger.warning(
            "The cache in %s stops filling: %s. Training continues and maps the other examples in each epoch. Free some space, "
            "or choose another cache.",
            self._place,
            reason,
        )

    def _open_memory(self) -> None:
        limit = int(psutil.virtual_memory().available * _OF_FREE_MEMORY) if self._limit is None else self._limit
        rows = self._admit(limit)
        self._columns = [np.empty((rows, size), np.uint8) for size in self._row_bytes]

    def _open_folder(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        with contextlib.ExitStack() as opened, _locked(os.path.join(self._place, ".lock")):
            in_use = opened.enter_context(open(os.path.join(self._folder, "in_use"), "ab", buffering=0))
            fcntl.flock(in_use, fcntl.LOCK_SH)  # until this process ends: other runs do not remove the folder
            os.utime(in_use.fileno())
            rows = self._admit(self._space())
            names = [*(f"{column}.rows" for column in range(len(self._row_bytes))), "index"]
            lengths = [*(rows * size for size in self._row_bytes), 8 * len(self._valid)]
            files: list[IO[bytes]] = []
            for name, length in zip(names, lengths, strict=True):
                descriptor = os.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                files.append(opened.enter_context(open(descriptor, "r+b", buffering=0)))
                if os.fstat(descriptor).st_size < length:
                    os.ftruncate(descriptor, length)  # a hole reads as zeros: entries of the index that are not written
            weakref.finalize(self, opened.pop_all().close)
        *columns, index = (
            np.asarray(np.memmap(file, np.uint8, "r", 0, (length,))) if length else np.zeros(0, np.uint8)
            for file, length in zip(files, lengths, strict=True)
        )
        self._columns = [column.reshape(rows, size) for column, size in zip(columns, self._row_bytes, strict=True)]
        self._files, self._lengths, self._index = files, lengths, index.view("<u8")

    def _space(self) -> int:
        """Returns the bytes that these rows may have, after the removal of old caches that no process uses."""
        for entry in os.scandir(self._place):
            if _REMOVED.fullmatch(entry.name):  # by a process that was killed
                shutil.rmtree(entry.path, ignore_errors=True)
        wanted = int(self._starts[-1]) * sum(self._row_bytes)
        others = {
            entry.path: _files_of(entry.path)
            for entry in os.scandir(self._place)
            if entry.name != self._key and _KEY.fullmatch(entry.name)
        }
        by_use = sorted(others, key=lambda path: max((stat.st_mtime for stat in others[path]), default=0.0))
        while True:
            if self._limit is None:
                own = sum(stat.st_blocks * 512 for stat in _files_of(self._folder))
                space = int((shutil.disk_usage(self._place).free + own) * _OF_FREE_SPACE)
            else:
                space = self._limit - sum(stat.st_size for stats in others.values() for stat in stats)
            if wanted <= space or not by_use:
                return max(space, 0)
            if _remove_unused(oldest := by_use.pop(0)):
                del others[oldest]
                logger.info("removed the cache %s, which no process used, to have space for another one", oldest)

    def _admit(self, limit: int) -> int:
        """Sets the blocks that may be stored within a limit of bytes; returns their number of rows."""
        row, total = sum(self._row_bytes), int(self._starts[-1])
        self._blocks = int(np.searchsorted(self._starts * row, limit, "right")) - 1
        rows = int(self._starts[self._blocks])
        if rows < total:
            logger.warning(
                "The cache in %s has space for %s of %s examples (%s of %s MB): the others are mapped in each epoch. Raise "
                "cache_bytes or free some space.",
                self._place,
                f"{rows:,}",
                f"{total:,}",
                f"{limit >> 20:,}",
                f"{total * row >> 20:,}",
            )
        return rows


def check_cache(cache: object, cache_bytes: object) -> Iterator[str]:
    """Yields the errors in the options of a cache."""
    if cache is not None and (
        not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache) or "://" in os.fspath(cache)
    ):
        yield f"cache must be 'memory' or a folder of this machine. Received: {format_value(cache)}."
    elif cache is not None and cache != "memory" and not _can_be_folder(os.fspath(cache)):
        yield f"cache must be 'memory' or a folder in which files can be written. Received: {format_value(cache)}."
    if cache_bytes is not None:
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, (int, np.integer)) or cache_bytes < 1:
            yield f"cache_bytes must be a whole number, 1 or more. Received: {format_value(cache_bytes)}."
        elif cache is None:
            yield "cache_bytes limits a cache: set cache to 'memory' or a folder, too."


def _can_be_folder(path: str) -> bool:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Returns rows as bytes, `[rows, row_bytes]`."""
    values = np.ascontiguousarray(values)
    if not values.size:
        return np.zeros((len(values), 0), np.uint8)
    return values.reshape(len(values), -1).view(np.uint8)


def _write_at(file: IO[bytes], content: bytes | memoryview, position: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, position)
        rest, position = rest[written:], position + written


def _files_of(folder: str) -> list[os.stat_result]:
    """Returns the sizes and times of a folder's files, which another process may be removing."""
    stats = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                stats.append(entry.stat(follow_symlinks=False))
    return stats


def _remove_unused(folder: str) -> bool:
    """Removes a cache, except if a process uses it. Returns whether it has."""
    try:
        with open(os.path.join(folder, "in_use"), "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed = f"{folder}.removed"
            os.rename(folder, removed)
        shutil.rmtree(removed)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lets one process of this machine at a time run the context."""
    with open(path, "ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
