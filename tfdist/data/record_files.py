"""`records_from`: training data in TFRecord files, each record read at its position, with its checksum."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import glob
import os
import struct
from collections.abc import Callable, Sequence
from typing import IO

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.data import stored_files
from tfdist.data.epoch_order import WINDOW
from tfdist.data.row_source import RowSource, block_rows
from tfdist.data.stored import StoredData, check_options
from tfdist.errors import ConfigError, format_value, list_first
from tfdist.runtime.log import logger

# A record: the length of the data and its checksum, the data, and their checksum.
_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_FRAME = _HEADER.size + _CHECKSUM.size  # bytes of a record besides its data
MOST_OPEN = 256  # files that are open at once
_SCANS = 8  # files that are indexed at once
_BUFFER = 1 << 14  # bytes that a scan reads at least: many short records at once, and little of long ones
_SEARCHED = 1 << 20  # bytes in which the next record is searched at once
_GZIP = b"\x1f\x8b"
_BAD_HEADER = "has a damaged header"
_BAD_DATA = "has another checksum"
_CUT = "is truncated"


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """The positions of a file's sound records.

    Attributes:
        path: The file.
        offsets: The position of each record's data, int64.
        lengths: The length of each record's data, int64.
        faults: The position of each damaged record, and its damage.
        version: The file's size, time of change and inode when it was scanned.
    """

    path: str
    offsets: np.ndarray
    lengths: np.ndarray
    faults: list[tuple[int, str]]
    version: stored_files.Version


class RecordFiles(RowSource):
    """Records of files: a row is the data of a record, a string.

    Args:
        indices: The records of each file.
    """

    origin = "records_from"

    def __init__(self, indices: Sequence[RecordIndex]):
        self._indices = indices
        self._crc = _checksums()
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._lengths = np.concatenate([index.lengths for index in indices])
        self._file_ends = np.cumsum([len(index.offsets) for index in indices])
        self.spec = tf.TensorSpec([], tf.string)
        total = len(self._offsets)
        row_bytes = int(self._lengths.sum()) // max(total, 1) + _FRAME
        self._block_rows = block_rows(total, row_bytes)
        starts = np.arange(0, total, self._block_rows)
        self.sizes = np.minimum(total - starts, self._block_rows)
        self.identity = repr([(os.path.basename(i.path), i.version[0], len(i.offsets), i.faults) for i in indices])
        self._open = functools.lru_cache(MOST_OPEN)(_File)

    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        records = blocks * self._block_rows + rows
        files = np.searchsorted(self._file_ends, records, "right").tolist()
        for number in set(files):
            stored_files.check_unchanged(self._indices[number].path, self._indices[number].version)
        read = np.empty(len(records), object)
        places = zip(files, self._offsets[records].tolist(), self._lengths[records].tolist(), strict=True)
        for row, (number, offset, length) in enumerate(places):
            path = self._indices[number].path
            try:
                # Held during the read: of two threads that open a file at once, the cache keeps one file.
                file = self._open(path)
                data = os.pread(file.descriptor, length + _CHECKSUM.size, offset)
            except OSError as e:
                raise ValueError(
                    f"{path} cannot be read at byte {offset:,}: {e.strerror}. Check the file, the permissions and the storage."
                ) from e
            record = data[:length]
            if _CHECKSUM.pack(self._crc(record)) != data[length:]:
                raise ValueError(
                    f"{path} is damaged: the record at byte {offset - _HEADER.size:,} has another checksum. Write the file "
                    "again, or train without its damaged records (on_corrupt='skip')."
                )
            read[row] = record
        return [read]


def records_from(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    parse: Callable[[tf.Tensor], Structure],
    batch_size: int = 64,
    seed: int = 0,
    shuffle: bool = True,
    batched: bool = False,
    on_corrupt: str = "fail",
    window: int = WINDOW,
) -> StoredData:
    """Opens TFRecord files, which may be larger than memory, as data for `fit`, `evaluate`, `predict` and `validation_data`.

        def parse(record):
            example = tf.io.parse_single_example(record, features)
            return tf.io.decode_jpeg(example["image"]), example["label"]

        data = tfdist.data.records_from("train-*.tfrecord", parse, batch_size=64)
        model.fit(data, epochs=3)

    Each worker reads only its replicas' records, in parallel and ahead of the steps, and compares their checksums. Each record
    counts once in an epoch, for any number of workers and replicas. `fit` shuffles the records of all files: the order is a pure
    function of `seed` and the epoch, so a resumed training reads no record that was used. `evaluate` and `predict` read in the
    order of the files' names. Needs `google-crc32c`: `pip install 'tfdist[records]'`.

    The files are indexed first: the length of each record is read, and compared with its checksum.

    Args:
        pattern: A pattern, a file, or a folder of `*.tfrecord*` files; or a list of these. Files must not be compressed, because a
            compressed file can only be read from its beginning.
        parse: A function in TensorFlow operations that returns the batch's `(x, y)`, or `(x, y, sample_weight)`, or `x`. It receives
            one record, a string, as `tf.io.parse_single_example` expects it; with `batched=True` a vector of the records of one
            replica's part of a batch, as `tf.io.parse_example` expects it, which is faster.
        batch_size: Examples per step over all replicas.
        seed: The seed of the shuffling.
        shuffle: Whether `fit` shuffles the records; also `fit(shuffle=False)` keeps their order.
        batched: Whether `parse` receives the records of a batch.
        on_corrupt: `"fail"` ends all workers with one error that names the worker, the file and the position of a damaged record.
            `"skip"` reads all files once to find the damaged records, warns with their number, and trains as if they did not exist.
        window: The number of records that are shuffled among each other. Blocks of about 1 MB of neighboring records are shuffled over all
            data.

    Returns:
        The data. `dataset()` returns a plain `tf.data` pipeline of the same batches.

    Raises:
        ConfigError: There are no files or no records; a file is truncated, compressed or not a TFRecord file; `google-crc32c` is not
            installed; or an option is out of range. The error names all such files.

    Examples:
        >>> import os, tempfile, tensorflow as tf, tfdist.data
        >>> path = os.path.join(tempfile.mkdtemp(), "numbers.tfrecord")
        >>> with tf.io.TFRecordWriter(path) as writer:
        ...     for number in range(6):
        ...         writer.write(tf.io.serialize_tensor(float(number)).numpy())
        >>> data = tfdist.data.records_from(path, lambda record: tf.io.parse_tensor(record, tf.float32), batch_size=4)
        >>> data.steps_per_epoch
        2
    """
    faults = check_options(batch_size, seed, parse, window, function="parse")
    if on_corrupt not in ("fail", "skip"):
        faults.append(f"on_corrupt must be 'fail' or 'skip'. Received: {format_value(on_corrupt)}.")
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else pattern
    if not isinstance(patterns, Sequence) or not all(isinstance(each, (str, os.PathLike)) for each in patterns):
        faults.append(
            f"pattern must be a path, a pattern of paths, or a list of these. Received: {format_value(pattern)}."
        )
    if faults:
        raise ConfigError(faults)
    files = _files([os.fspath(each) for each in patterns])
    skip = on_corrupt == "skip"
    _checksums()
    with concurrent.futures.ThreadPoolExecutor(_SCANS) as threads:
        results = list(threads.map(lambda file: _index_or_fault(file, skip), files))
    faults = [result for result in results if isinstance(result, str)]
    stored_files.raise_all(faults)
    indices = [result for result in results if isinstance(result, RecordIndex)]
    if not sum(len(index.offsets) for index in indices):
        raise ConfigError(f"{list_first(files, stored_files.MOST_FAULTS)}: no records. Give files that have some.")
    for index in indices:
        if index.faults:
            position, why = index.faults[0]
            count = len(index.faults)
            logger.warning(
                f"skipped damaged records: {count:,} of {count + len(index.offsets):,} in {index.path}; the first, at byte "
                f"{position:,}, {why}"
            )
    if not batched:
        parse = _each(parse)
    return StoredData(RecordFiles(indices), batch_size, seed, shuffle, parse, window)


class _File:
    """An open file, which closes once neither the cache nor a thread that reads holds it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _each(parse: Callable[[tf.Tensor], Structure]) -> Callable[[tf.Tensor], Structure]:
    """Returns a function of a vector of records that calls `parse` for each and stacks the results."""

    def parse_all(records: tf.Tensor) -> Structure:
        size = records.shape[0] or tf.size(records, tf.int64)
        parsed = tf.data.Dataset.from_tensor_slices(records).map(parse)
        return parsed.batch(size, drop_remainder=isinstance(size, int)).get_single_element()

    converted: Callable[[tf.Tensor], Structure] = tf.autograph.experimental.do_not_convert(parse_all)
    return converted


def _files(patterns: Sequence[str]) -> list[str]:
    """Returns the files of all patterns. Raises ConfigError with the patterns that match none."""
    faults = []
    files: set[str] = set()
    for pattern in patterns:
        if "://" in pattern:
            faults.append(f"records_from reads local files, not {pattern}. Save the files to a local disk first.")
            continue
        if os.path.isfile(pattern):  # its name may look like a pattern
            files.add(pattern)
            continue
        wanted = pattern
        if os.path.isdir(pattern):
            wanted = os.path.join(glob.escape(pattern), "*.tfrecord*")
        found = list(filter(os.path.isfile, glob.glob(wanted)))
        files.update(found)
        if not found:
            faults.append(f"no file matches {pattern}. Give a pattern, a file, or a folder of .tfrecord files.")
    if faults or not files:
        raise ConfigError(faults or "pattern is an empty list. Give at least one file or pattern.")
    return sorted(files)


def _index_or_fault(path: str, skip: bool) -> RecordIndex | str:
    """Returns the index of a file, or its error."""
    try:
        with open(path, "rb", _BUFFER) as file:
            version = stored_files.version(os.fstat(file.fileno()))
            beginning = os.pread(file.fileno(), len(_GZIP), 0)
            index = _scan(file, path, version, skip)
    except OSError as e:
        return f"{path} cannot be read: {e.strerror or e}. Check the file and the permissions."
    if not index.faults:
        return index
    position, why = index.faults[0]
    if not len(index.offsets) and beginning == _GZIP:
        return f"{path} is compressed, and can only be read from its beginning. Save a plain file, such as by `gunzip < {path} > {path}.plain`."
    if not len(index.offsets) and position == 0 and why == _BAD_HEADER:
        return f"{path} is not a TFRecord file. Give files that tf.io.TFRecordWriter has written, without compression."
    if skip:
        return index
    return (
        f"{path} is damaged: the record at byte {position:,} {why}. Write the file again, or train without its damaged records "
        "(on_corrupt='skip')."
    )


def _scan(file: IO[bytes], path: str, version: stored_files.Version, skip: bool) -> RecordIndex:
    """Finds the records of a file, which is at its beginning.

    With `skip` compares the checksums of the data, and searches for the next record after a damaged header; else the scan ends there.
    """
    crc = _checksums()
    size = version[0]
    position = 0
    offsets = []
    lengths = []
    faults = []
    while position < size:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            faults.append((position, _CUT))
            break
        length, checksum = _HEADER.unpack(header)
        if crc(header[: _LENGTH.size]) != checksum:
            faults.append((position, _BAD_HEADER))
            if not skip:
                break
            # The length is not known: the next record begins where a header has its checksum.
            position = file.seek(_next_record(file, position + 1, size, crc))
            continue
        if position + _FRAME + length > size:
            faults.append((position, _CUT))
            break
        if skip and _CHECKSUM.pack(crc(file.read(length))) != file.read(_CHECKSUM.size):
            faults.append((position, _BAD_DATA))
        else:
            offsets.append(position + _HEADER.size)
            lengths.append(length)
        position = position + _FRAME + length
        file.seek(position)
    return RecordIndex(path, np.array(offsets, np.int64), np.array(lengths, np.int64), faults, version)


def _next_record(file: IO[bytes], position: int, size: int, crc: Callable[[bytes], int]) -> int:
    """Returns the position of the first intact header at or after a position; the size of the file if there is none."""
    while position < size:
        file.seek(position)
        data = file.read(_SEARCHED + _HEADER.size - 1)
        if len(data) < _HEADER.size:
            break
        windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), _LENGTH.size)
        lengths = np.ascontiguousarray(windows[: len(data) - _HEADER.size + 1]).view("<u8").ravel()
        # A record of length 0 is not searched for: in a region of zeros each position could be one.
        fits = (lengths > 0) & (lengths <= np.uint64(size))
        for start in np.flatnonzero(fits).tolist():
            length, checksum = _HEADER.unpack_from(data, start)
            if position + start + _FRAME + length <= size and crc(data[start : start + _LENGTH.size]) == checksum:
                return position + start
        position += _SEARCHED
    return size


def _checksums() -> Callable[[bytes], int]:
    """Returns the function of TFRecord's checksum: CRC-32C, rotated, plus a constant. Raises ConfigError if its package is missing."""
    try:
        import google_crc32c
    except ImportError as e:
        raise ConfigError("records_from needs google-crc32c: pip install 'tfdist[records]'.") from e
    value = google_crc32c.value

    def masked(data: bytes) -> int:
        crc: int = value(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    return masked
