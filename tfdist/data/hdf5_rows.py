"""Rows of an HDF5 data set: mapped into memory where its bytes are contiguous in the file, else read by HDF5."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.data import stored_files
from tfdist.data.array_files import StoredArray


def open_dataset(dataset: Any) -> Callable[..., np.ndarray]:
    """Returns the function that reads rows of an `h5py.Dataset`; it takes their indices and, as `ndarray.take`, an axis."""

    def read(indices: np.ndarray, axis: int = 0) -> np.ndarray:
        # Runs of neighboring rows: h5py's selection by indices takes up to 30 times as long.
        rows, inverse = np.unique(indices, return_inverse=True)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
        return np.concatenate([dataset[run[0] : run[-1] + 1] for run in runs])[inverse]

    array = _contiguous(dataset)
    if array is None:
        return read
    mapped = array.map()

    def read_mapped(indices: np.ndarray, axis: int = 0) -> np.ndarray:
        stored_files.check_unchanged(array.path, array.version)
        return array.typed(mapped[indices])

    return read_mapped


def _contiguous(dataset: Any) -> StoredArray | None:
    """Returns the place of a data set of numbers in its file; None if its bytes are not all there, in order."""
    offset = dataset.id.get_offset()
    file = dataset.file
    is_plain = file.mode == "r" and file.driver == "sec2" and not dataset.is_virtual and not dataset.external
    if offset is None or dataset.chunks or not is_plain or dataset.dtype.kind not in "biufc" or not dataset.size:
        return None
    path = os.fspath(file.filename)
    version = stored_files.version(os.stat(path))
    return StoredArray(path, dataset.name, offset, len(dataset), dataset.shape[1:], dataset.dtype, version)
