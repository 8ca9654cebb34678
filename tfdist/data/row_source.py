"""`RowSource`: stored rows, in blocks, which a source of another format reads."""

from __future__ import annotations

import abc
import contextlib
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfdist.aliases import Spec, Structure
from tfdist.errors import DataError

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1 << 12
_MOST_BLOCKS = 1 << 16
_READ_ERROR = re.compile(rf"{DataError.__name__}: ([^\n]*)")


class RowSource(abc.ABC):
    """Stored rows, in blocks. A source of another format implements `read`; several threads call it.

    Attributes:
        spec: The specification of one row: a structure of `tf.TensorSpec`s without a batch axis.
        sizes: The number of rows in each block, int64; at most some 100,000 blocks.
        origin: The name of the function that opens such a source, for messages.
        identity: A text that two sources share only if they hold the same rows, also on several hosts: names, lengths and types.
    """

    spec: Spec
    sizes: np.ndarray
    identity: str
    origin: str

    @abc.abstractmethod
    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Reads rows; returns an array `[len(rows), ...]` for each leaf of `spec`, which the caller may keep.

        Args:
            blocks: The block of each row, int64.
            rows: The index of each row in its block, int64.

        Raises:
            ValueError: The rows cannot be read. The message names the file and the row.
        """


def block_rows(rows: int, row_bytes: int) -> int:
    """Returns the number of rows in a block of a file that is read row by row."""
    return max(min(BLOCK_BYTES // max(row_bytes, 1), BLOCK_ROWS), -(-rows // _MOST_BLOCKS), 1)


def read_rows(source: RowSource, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Reads rows in a dataset's function. Raises DataError if that fails, which `explaining_reads` raises again."""
    try:
        return source.read(blocks, rows)
    except (OSError, ValueError) as e:
        fault = str(e)
        raise DataError(fault) from e


def call(function: Callable[..., Structure], batch: Structure) -> Structure:
    """Calls a function of a batch as `Dataset.map` does: the parts of a tuple are its arguments."""
    if isinstance(batch, tuple):
        return function(*batch)
    return function(batch)


@contextlib.contextmanager
def explaining_reads() -> Iterator[None]:
    """Turns TensorFlow's error for a read that has failed, on this worker or another one, into a `DataError`."""
    try:
        yield
    except tf.errors.OpError as e:
        match = _READ_ERROR.search(e.message)
        if match:
            sentence = match[1]
            raise DataError(sentence) from e
        raise
