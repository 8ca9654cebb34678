"""Rows of a `datasets.Dataset`: gathered at their bytes in the mapped Arrow files, else read by Arrow.

Arrow's own random access takes two to ten times as long as a gather by NumPy, and NumPy's format of `datasets` changes types.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.data.array_files import LONG_ROW
from tfdist.errors import ConfigError

_FILE = {"bytes", "path"}  # the fields of a `datasets.Image` or `Audio`
_MOST_ELEMENTS = 1 << 62  # of a view of NumPy; chunks may be terabytes of addresses apart


def open_dataset(dataset: Any, names: Sequence[str]) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns the function that reads rows of some columns. Raises ConfigError if rows of a column do not share a shape."""
    table = dataset.data.table
    mapped = {}
    faults = []
    for name in names:
        try:
            chunks = [_flattened(chunk) for chunk in table.column(name).chunks if len(chunk)]
            shapes = {tuple(shape) for _, shape in chunks}
            if len(shapes) > 1:
                raise ValueError(f"lists of several lengths: {sorted(shapes)}")
            kinds = {elements.type for elements, _ in chunks}
            if not all(map(_is_readable, kinds)):
                raise ValueError(f"the type {kinds.pop()}")
            gather = _mapped([_view(*chunk) for chunk in chunks])
            if gather:
                mapped[name] = gather
        except ValueError as e:
            faults.append(
                f"Column {name!r} of source has {e}. Rows must have one shape: pad, cut or fill them with dataset.map, call "
                "flatten_indices() after a filter, or leave the column out of `columns`."
            )
    if faults:
        raise ConfigError(faults)
    others = [name for name in names if name not in mapped]
    by_arrow = dataset.select_columns(others).with_format("arrow")
    # After `shuffle` or `filter`, the rows of the files that are the dataset's.
    order = None
    if dataset._indices is not None:
        order = dataset._indices.table.column(0).to_numpy()

    def read(indices: np.ndarray) -> dict[str, np.ndarray]:
        stored = indices if order is None else order[indices].astype(np.int64)
        rows = {name: gather(stored) for name, gather in mapped.items()}
        if others:
            table = by_arrow[indices]
            rows |= {name: _converted(table.column(name)) for name in others}
        return {name: rows[name] for name in names}

    return read


def _flattened(chunk: Any) -> tuple[Any, list[int]]:
    """Returns the elements of the lists of an Arrow array, and the shape of a row. Raises ValueError for nulls and unequal lists."""
    import pyarrow as pa

    shape: list[int] = []
    while True:
        chunk = getattr(chunk, "storage", chunk)  # of Array2D
        if chunk.null_count:
            raise ValueError("nulls")
        kind = chunk.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = np.diff(chunk.offsets.to_numpy())
            if len(lengths) and (lengths != lengths[0]).any():
                raise ValueError(f"lists of {lengths.min()} to {lengths.max()} elements")
        elif not pa.types.is_fixed_size_list(kind):
            return chunk, shape
        elements = chunk.flatten()
        shape.append(len(elements) // max(len(chunk), 1))
        chunk = elements


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_file(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and {field.name for field in kind} == _FILE


def _is_readable(kind: Any) -> bool:
    import pyarrow as pa

    is_text = any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
    return is_text or _is_number(kind) or _is_file(kind) or pa.types.is_boolean(kind)


def _view(elements: Any, shape: list[int]) -> np.ndarray | None:
    """Returns rows as an array over Arrow's memory; None for elements that are no numbers there, such as strings and bits."""
    if not _is_number(elements.type):
        return None
    return elements.to_numpy(zero_copy_only=True).reshape(-1, *shape) if len(elements) else None


def _mapped(views: Sequence[np.ndarray | None]) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns a gather over the arrays of all chunks, by addresses: a gather for each chunk would take as many calls of NumPy."""
    chunks = [view for view in views if view is not None]
    if not chunks or len(chunks) < len(views):
        return None
    shape, dtype, stride = chunks[0].shape[1:], chunks[0].dtype, chunks[0].strides[0]
    ends = np.cumsum([len(chunk) for chunk in chunks])
    addresses = np.array([chunk.ctypes.data for chunk in chunks])
    base = int(addresses.min())
    span = int((addresses + [chunk.nbytes for chunk in chunks]).max()) - base
    if span * stride >= _MOST_ELEMENTS:
        return None
    # One array from the first byte of all chunks to the last one. Only bytes of rows are read: others may not be mapped.
    interface = {"data": (base, True), "shape": (span,), "typestr": "|u1", "version": 3}
    memory = np.asarray(types.SimpleNamespace(__array_interface__=interface, chunks=chunks))  # it holds their memory
    # The row that begins at each byte, as bytes, or as a record: short records are copied up to four times as fast.
    starts = np.lib.stride_tricks.sliding_window_view(memory, stride)
    if stride < LONG_ROW:
        starts = np.ndarray((span - stride + 1,), f"V{stride}", memory, 0, (1,))
    # The place of row 0 of the column, if it lay in the chunk.
    origins = addresses - base - (ends - [len(chunk) for chunk in chunks]) * stride

    def gather(rows: np.ndarray) -> np.ndarray:
        found = starts[origins[ends.searchsorted(rows, "right")] + rows * stride]
        return found.view(dtype).reshape(len(rows), *shape)

    return gather


def _converted(column: Any) -> np.ndarray:
    """Returns a column of rows as an array: strings and files as bytes."""
    import pyarrow as pa

    elements, shape = _flattened(column.combine_chunks())
    if _is_file(elements.type):
        values = np.empty(len(elements), object)
        values[:] = [_contents(file) for file in elements.to_pylist()]
    elif _is_number(elements.type) or pa.types.is_boolean(elements.type):
        values = elements.to_numpy(zero_copy_only=False)
    else:
        values = elements.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
    return values.reshape(len(column), *shape)


def _contents(file: dict[str, Any]) -> bytes:
    """Returns the bytes of an image, which the Arrow file holds, or another file."""
    if file["bytes"] is not None:
        held: bytes = file["bytes"]
        return held
    with open(file["path"], "rb") as opened:
        return opened.read()
