"""`Conversion`: the results of a function of stored rows, which one process of a host computes once and all map into memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import psutil
import tensorflow as tf

from tfdist.aliases import Spec, Structure
from tfdist.data import map_identity
from tfdist.data.row_source import RowSource, call, explaining_reads, read_rows
from tfdist.errors import ConfigError, DataError, format_value
from tfdist.runtime.log import logger
from tfdist.runtime.report import phase

_READS = 4  # blocks that are converted at once
_OF_FREE_SPACE = 0.9
_OF_FREE_MEMORY = 0.5
WAIT_SECONDS = 6 * 3600.0  # for the conversion of another process
_IDENTITY = "identity.json"
_CHECKSUMS = "checksums.npy"
_PARTIAL = ".partial"


class Conversion:
    """The results of a function of rows, in a `.npy` file for each column, in memory or in a folder.

    A conversion is written under another name and renamed at the end, so a folder with the name of its identity is complete.

    Args:
        source: The stored rows.
        function: The function of a batch, which is called on the rows of a block; None keeps the rows themselves.
        place: "memory", or a folder.

    Raises:
        ConfigError: The results cannot be kept: the function draws random numbers, calls Python, uses tables, or its rows
            have no fixed shape; or the source has no version.
    """

    def __init__(self, source: RowSource, function: Callable[..., Structure] | None, place: str):
        self._source = source
        self._place = place
        specs = tf.nest.flatten(source.spec)

        def of_columns(*columns: tf.Tensor) -> Structure:
            batch = tf.nest.pack_sequence_as(source.spec, columns)
            if function is None:
                return tf.nest.map_structure(tf.identity, batch)
            return call(function, batch)

        signature = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in specs]
        self._function = tf.function(of_columns, input_signature=signature).get_concrete_function()
        faults = list(map_identity.cache_faults(self._function))
        if not source.version:
            name = type(source).__name__
            faults.append(
                f"cache needs a source that knows the version of its data: set the attribute version of {name}."
            )
        if faults:
            raise ConfigError(faults)
        self._spec = tf.nest.map_structure(
            lambda result: tf.TensorSpec(result.shape[1:], result.dtype), self._function.structured_outputs
        )
        self._specs = tf.nest.flatten(self._spec)
        columns = (f"{column}.npy" for column in range(len(self._specs)))
        self._names = [_IDENTITY, _CHECKSUMS, *columns]

    @functools.cached_property
    def rows(self) -> ConvertedRows | None:
        """The results, in the blocks of the source, which the first access converts if necessary; None if there is no space for them.

        Raises:
            DataError: The source cannot be read, the function does not return a row for each row, or a file belongs to another user.
        """
        # The program may be tracing a function; other tasks wait in a step for as long as a conversion takes.
        with tf.init_scope(), phase.slow("the conversion of data for a cache", 0):
            try:
                if self._place == "memory":
                    return self._in_memory()
                return self._in_folder()
            except OSError as e:
                logger.warning(
                    f"There is no cache in {self._place}: {e.strerror or e}. Training continues, and the examples are mapped in each epoch. Free "
                    "some space, or choose another cache."
                )
                return None

    def _in_memory(self) -> ConvertedRows:
        self._check_space(psutil.virtual_memory().available * _OF_FREE_MEMORY)
        # Files in memory are mapped as those of a folder, and go with the process.
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(open(os.memfd_create("tfdist-cache", os.MFD_CLOEXEC), "w+b")) for _ in self._specs
            ]
            return ConvertedRows(self._source, self._spec, files, self._write_rows(files))

    def _in_folder(self) -> ConvertedRows | None:
        source = self._source
        identity = json.dumps(
            {
                "format": 2,
                "tensorflow": tf.__version__,
                "rows": source.identity,
                "files": source.version,
                "blocks": hashlib.blake2b(source.sizes.tobytes(), digest_size=16).hexdigest(),
                "types": repr(source.spec),
                "map": map_identity.digest(self._function),
            }
        ).encode()
        place = _own_folder(self._place)
        folder = os.path.join(place, hashlib.blake2b(identity, digest_size=16).hexdigest())
        rows = self._read(folder, identity)
        if rows:
            return rows
        with _locked(os.path.join(place, ".lock")):
            # Another process may have converted the rows during the wait.
            rows = self._read(folder, identity)
            if rows:
                return rows
            self._write(folder, identity)
            return self._read(folder, identity)

    def _read(self, folder: str, identity: bytes) -> ConvertedRows | None:
        """Returns the rows of a folder; None if there are none, or a file is missing or truncated."""
        with contextlib.ExitStack() as opened:
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                opened.callback(os.close, lock)
                # Other runs do not remove the folder until the rows are released.
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.utime(lock)
                found, checksums, *files = [
                    opened.enter_context(_open_own(os.path.join(folder, name), os.O_RDONLY)) for name in self._names
                ]
                if found.read() != identity:
                    return None
                rows = ConvertedRows(self._source, self._spec, files, np.load(checksums), folder)
            except (OSError, ValueError, EOFError):
                return None
            # A copy of the descriptor keeps the lock until the rows are freed.
            weakref.finalize(rows, os.close, os.dup(lock))
            return rows

    def _write(self, folder: str, identity: bytes) -> None:
        place = os.path.dirname(folder)
        for entry in list(os.scandir(place)):
            # Of a process that was killed, because this one holds the lock.
            if entry.name.endswith(_PARTIAL) or entry.path == folder:
                shutil.rmtree(entry.path)
        self._check_space(_make_space(place, self._bytes))
        partial = folder + _PARTIAL
        os.mkdir(partial, 0o700)
        try:
            with contextlib.ExitStack() as opened:
                new = os.O_RDWR | os.O_CREAT | os.O_EXCL
                file, checksums, *files = [
                    opened.enter_context(_open_own(os.path.join(partial, name), new)) for name in self._names
                ]
                np.save(checksums, self._write_rows(files))
                file.write(identity)
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _write_rows(self, files: Sequence[IO[bytes]]) -> np.ndarray:
        """Writes the results for all blocks; returns a checksum for each block."""
        sizes = self._source.sizes
        specs = tf.nest.flatten(self._source.spec)
        total = int(sizes.sum())
        logger.info(f"converts {total:,} examples once for the cache in {self._place}")

        def read(block: np.ndarray) -> list[np.ndarray]:
            size = int(sizes[block])
            return read_rows(self._source, np.full(size, block, np.int64), np.arange(size))

        def results(block: tf.Tensor) -> tuple[tf.Tensor, ...]:
            columns = tf.numpy_function(read, [block], [spec.dtype for spec in specs])
            for column, spec in zip(columns, specs, strict=True):
                column.set_shape([None, *spec.shape])
            return tuple(tf.nest.flatten(self._function(*columns)))

        for file, spec in zip(files, self._specs, strict=True):
            descr = np.lib.format.dtype_to_descr(np.dtype(spec.dtype.as_numpy_dtype))
            shape = (total, *spec.shape)
            np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        checksums = np.zeros(len(sizes), np.uint32)
        blocks = np.flatnonzero(sizes)
        dataset = tf.data.Dataset.from_tensor_slices(blocks)
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(results), _READS, deterministic=True).prefetch(1)
        with explaining_reads():
            for block, columns in zip(blocks.tolist(), dataset.as_numpy_iterator(), strict=True):
                lengths = {len(column) for column in columns} - {int(sizes[block])}
                if lengths:
                    raise DataError(
                        f"map must return a row for each row. Received: {lengths.pop()} rows for {sizes[block]} rows of a block."
                    )
                for file, column in zip(files, columns, strict=True):
                    content = column.tobytes()
                    checksums[block] = zlib.crc32(content, int(checksums[block]))
                    file.write(content)
        for file in files:
            file.flush()
        return checksums

    @property
    def _bytes(self) -> int:
        row_bytes = sum(spec.shape.num_elements() * spec.dtype.size for spec in self._specs)
        return int(self._source.sizes.sum()) * row_bytes

    def _check_space(self, space: float) -> None:
        if self._bytes > space:
            fault = f"it needs {self._bytes >> 20:,} MB, and may use {int(space) >> 20:,} MB"
            raise OSError(errno.ENOSPC, fault)


class ConvertedRows(RowSource):
    """Rows of mapped `.npy` files, in the blocks of the source from which they were converted.

    Args:
        source: That source.
        spec: The specification of a row.
        files: The file of each column, at any position.
        checksums: A checksum for each block, which is compared when the block is first read.
        folder: The folder of the files; empty for files in memory.
    """

    def __init__(
        self, source: RowSource, spec: Spec, files: Sequence[IO[bytes]], checksums: np.ndarray, folder: str = ""
    ):
        self.spec = spec
        self.sizes = source.sizes
        self.origin = source.origin
        self.identity = source.identity
        self.version = source.version
        self._starts = np.concatenate([[0], np.cumsum(source.sizes)])
        types = [each.dtype.as_numpy_dtype for each in tf.nest.flatten(spec)]
        self._columns = [_mapped(file, dtype) for file, dtype in zip(files, types, strict=True)]
        self._checksums = checksums
        self._folder = folder
        self._is_checked = np.zeros(len(checksums), bool)

    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        for block in np.unique(blocks[~self._is_checked[blocks]]).tolist():
            self._check(block)
        numbers = self._starts[blocks] + rows
        return [column.take(numbers, 0) for column in self._columns]  # in half the time of column[numbers]

    def _check(self, block: int) -> None:
        begin, end = self._starts[block : block + 2].tolist()
        checksum = 0
        for column in self._columns:
            checksum = zlib.crc32(column[begin:end].tobytes(), checksum)
        if checksum != self._checksums[block]:
            if self._folder:
                _remove_identity(self._folder)
            raise ValueError(
                f"The cache {self._folder or 'in memory'} is damaged. Start the training again: it converts the data again. Check the disk "
                "if this message returns."
            )
        self._is_checked[block] = True


def _remove_identity(folder: str) -> None:
    """Makes the next start convert the rows again."""
    try:
        os.unlink(os.path.join(folder, _IDENTITY))
    except OSError:  # another process has removed it, or the disk fails: the error about the damage follows
        pass


def cache_faults(cache: object) -> Iterator[str]:
    """Yields the errors in the option `cache`."""
    if cache is None or cache == "memory":
        return
    if not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache) or "://" in os.fspath(cache):
        yield f"cache must be 'memory' or a folder of this machine. Received: {format_value(cache)}."
        return
    try:
        _own_folder(os.fspath(cache))
    except DataError as e:
        yield str(e)
    except OSError:
        yield f"cache must be 'memory' or a folder in which files can be written. Received: {format_value(cache)}."


def _own_folder(place: str) -> str:
    """Returns the folder of this user in a folder that users may share. Raises DataError if another user can change its files."""
    folder = os.path.join(place, f"tfdist-{os.geteuid()}")
    try:
        os.makedirs(folder, 0o700)
    except FileExistsError:  # perhaps made by another user, or a link: it is checked
        pass
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise DataError(
            f"{folder} must be a folder of user {os.geteuid()} with the permissions 700, because its rows are trained. Found: "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}. Remove it, or choose another cache."
        )
    return folder


def _open_own(path: str, flags: int) -> IO[bytes]:
    """Opens a file without following a link. Raises DataError if it belongs to another user."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise DataError(f"{path} belongs to user {owner}. Remove it, or choose another cache.")
    mode = "rb" if flags == os.O_RDONLY else "w+b"
    return open(descriptor, mode)


def _mapped(file: IO[bytes], dtype: type[Any]) -> np.ndarray:
    """Maps an array. Its type is given, because a file does not know types such as bfloat16. Raises ValueError if it is truncated."""
    file.seek(0)
    np.lib.format.read_magic(file)
    shape, _, _ = np.lib.format.read_array_header_1_0(file)
    return np.asarray(np.memmap(file, dtype, "r", file.tell(), shape))


def _make_space(place: str, needed: int) -> float:
    """Removes caches that no process uses, the least recently used first, until the space suffices; returns the space."""
    caches = sorted(
        (entry for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)),
        key=lambda entry: entry.stat().st_mtime,
    )
    for entry in caches:
        if needed <= free_space(place):
            break
        # Rows in use hold a shared lock (`_read`).
        lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path)
            logger.info(f"removed the cache {entry.path}, which no process used, to have space for another one")
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(lock)
    return free_space(place)


def free_space(place: str) -> float:
    """Returns the bytes that caches may take in a folder: a part of what is free there."""
    return shutil.disk_usage(place).free * _OF_FREE_SPACE


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lets one process of this machine at a time run the context. Raises DataError if the wait exceeds its limit."""
    with _open_own(path, os.O_RDWR | os.O_CREAT) as file:
        ends = time.monotonic() + WAIT_SECONDS
        waits = False
        # A call that blocks would have no limit and could not say what it waits for.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    logger.info(f"waits for another process, which converts data in {os.path.dirname(path)}")
                waits = True
            if time.monotonic() > ends:
                raise DataError(
                    f"Another process holds the lock {path} for more than {WAIT_SECONDS / 3600:g} hours. End it (`fuser {path}` shows it), "
                    "or choose another cache."
                )
            time.sleep(0.1)
        yield
