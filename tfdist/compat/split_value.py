"""A value of which each rank holds a part: one interface for an optimizer's slots, for tables, and for variables in a mesh of workers.

Files hold it as the one array that Keras would write. While all workers save together, the chief reads the others' elements, in chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_files, keras_internals
from tfdist.errors import ConfigError
from tfdist.sharding.split import CHUNK_BYTES, Index, Split, shape_of, view

# Reads the rows of a value from `begin` on into an array, while all workers take part in a save.
Reader = Callable[[np.ndarray, int], None]
_readers: dict[int, Reader] = {}  # by `SplitValue.key`


class SplitValue:
    """A variable, a slot or a table of which this process holds some parts.

    Attributes:
        path: Its path: equal for any number of ranks.
        dtype: The type of the elements.
        split: Which elements each rank holds; for a table, each shard.
        held: The ranks of `split` whose parts this process holds: its own one, or all.
        assign: Sets this process's parts to their elements of a whole value.
    """

    path: str
    dtype: Any
    split: Split
    held: Sequence[int]
    assign: Callable[[Any], Any]

    def variables(self) -> Sequence[tf.Variable]:
        """Returns the variable of each part in `held`."""
        raise NotImplementedError

    @property
    def is_divided(self) -> bool:
        """True if other processes hold other parts."""
        return len(self.held) < len(self.split.indices)

    @property
    def key(self) -> int:
        """A number that objects for the same value share."""
        return id(self.variables()[0])

    @property
    def is_large(self) -> bool:
        """True if the value has several chunks."""
        return tf.TensorShape(self.split.shape).num_elements() * tf.as_dtype(self.dtype).size > CHUNK_BYTES

    def components(self) -> list[tf.Variable]:
        """Returns the variables on the devices of this process."""
        return [component for variable in self.variables() for component in copies(variable)]

    def stored(self) -> Iterator[tuple[Index, tf.Variable]]:
        """Yields the index and the variable of each part that this process stores in a backup. `read_part` reads it."""
        for rank, variable in zip(self.held, self.variables(), strict=True):
            index = self.split.indices[rank]
            if index is not None and self.split.size(rank):
                yield index, copies(variable)[0]

    def own(self, rows: range) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the elements of a chunk that this process stores, with their indices in the chunk."""
        for rank, variable in zip(self.held, self.variables(), strict=True):
            overlap = self.split.overlap(rank, rows)
            if overlap is not None:
                index, local = overlap
                yield index, self._read(copies(variable)[0], local)

    def _read(self, variable: tf.Variable, local: slice) -> np.ndarray:
        return variable[local].numpy()

    def new_chunk(self, rows: int) -> np.ndarray:
        """Returns an array for some rows of the value."""
        return np.empty((rows, *self.split.shape[1:]), tf.as_dtype(self.dtype).as_numpy_dtype)

    def chunks(self) -> Iterator[range]:
        """Yields all rows, in chunks of at most 64 MB."""
        return self.split.chunks(tf.as_dtype(self.dtype).size)

    def fill(self, chunk: np.ndarray, begin: int) -> None:
        """Reads the rows from `begin` on into an array. Raises ConfigError if other processes hold some, and do not take part in a save."""
        read = _readers.get(self.key, self._read_alone)
        read(chunk, begin)

    def _read_alone(self, chunk: np.ndarray, begin: int) -> None:
        if self.is_divided:
            raise must_save_together(f"Each worker holds a part of {self.path}")
        for index, elements in self.own(range(begin, begin + len(chunk))):
            view(chunk, index)[...] = elements

    def numpy(self) -> Any:
        """Returns the whole value. Raises as `fill` does."""
        whole = self.new_chunk((self.split.shape or (1,))[0])
        for rows in self.chunks():
            self.fill(whole[rows.start : rows.stop], rows.start)
        return whole.reshape(self.split.shape)

    def save(self, store: Any, key: str) -> None:
        """Writes the value to an entry of Keras' store, in chunks."""
        dataset = keras_files.new_dataset(store, key, self.split.shape, tf.as_dtype(self.dtype))
        if dataset is None:
            store[key] = self.numpy()
            return
        for rows in self.chunks():
            chunk = self.new_chunk(len(rows))
            self.fill(chunk, rows.start)
            dataset[rows.start : rows.stop] = chunk

    def load(self, store: Any, key: str) -> None:
        """Reads the value from an entry of Keras' store."""
        self.assign(keras_files.dataset(store, key))


class Holder(Protocol):
    """The place of this process's piece in a variable, and in the optimizer's slots of it."""

    @property
    def split(self) -> Split:
        """The elements that each process stores."""

    @property
    def rank(self) -> int:
        """The number of this process in `split`."""

    @property
    def index(self) -> Index:
        """The elements that this process holds; with equal pieces, another one may store them."""

    def join(self, piece: tf.Tensor) -> tf.Tensor:
        """Returns the whole value. A collective, or an error if one process cannot have it."""


class SplitVariable(SplitValue, keras.Variable):
    """A variable of Keras with this process's elements, which stands for the whole value.

    Attributes:
        holder: Its `Holder`.
    """

    holder: Holder

    @property
    def split(self) -> Split:  # type: ignore[override]
        return self.holder.split

    @property
    def held(self) -> Sequence[int]:  # type: ignore[override]
        return (self.holder.rank,)

    def variables(self) -> Sequence[tf.Variable]:
        return (keras_internals.raw_value(self),)

    def _read_alone(self, chunk: np.ndarray, begin: int) -> None:
        whole = self.holder.join(self.variables()[0].read_value())
        chunk[...] = whole[begin : begin + len(chunk)].numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)


class SplitSlot(SplitVariable):
    """A slot of an optimizer for the piece of a variable: a piece for updates, and the whole slot for files."""

    def assign(self, value: Any) -> Any:
        if tuple(value.shape) == self.split.shape and value.shape != self.shape:
            value = view(np.ascontiguousarray(value), self.holder.index)
        return super().assign(value)


def become(variable: keras.Variable, kind: type[SplitVariable], holder: Any) -> Any:
    """Makes a variable of Keras one of a value that is split, in place, and returns it.

    Layers and optimizers create variables themselves, and neither they nor Keras take another class or shape for them.
    """
    variable.__class__ = kind
    variable.holder = holder
    return variable


def is_split(value: object) -> TypeGuard[SplitValue]:
    """Returns whether this process holds parts of a value, rather than the whole one in one variable."""
    return isinstance(value, SplitValue)


def held(variable: Any) -> Any:
    """Returns a split value itself, and TensorFlow's variable of any other variable of Keras."""
    return variable if is_split(variable) else variable.value


def must_save_together(reason: str) -> ConfigError:
    """Returns the error of a worker that would save by itself a value of which others hold parts."""
    return ConfigError(
        f"{reason}, so a worker cannot save it by itself: call trainer.save, model.save or model.save_weights on all workers, and give a callback "
        "that does to all of them."
    )


@contextlib.contextmanager
def reading(readers: Mapping[int, Reader]) -> Iterator[None]:
    """Reads values through functions within the context. `readers` are by `SplitValue.key`."""
    _readers.update(readers)
    try:
        yield
    finally:
        for key in readers:
            _readers.pop(key, None)


def is_read_by_all(value: SplitValue) -> bool:
    """Returns whether all workers take part in a save of the value."""
    return value.key in _readers


def read_part(index: Index, variable: tf.Variable) -> tf.Tensor:
    """Returns the elements of a part, without unused rows at its end."""
    value = variable.read_value()
    rows = shape_of(index)[0]
    return value if value.shape[0] == rows else value[:rows]


def copies(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Returns a variable's copies on the devices of this process."""
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None:
        return (variable,)
    copies: Sequence[tf.Variable] = strategy.experimental_local_results(variable)
    return copies
