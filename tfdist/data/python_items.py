"""Data that Python code makes, with the choice of how several workers share it: `from_pydataset`, `from_generator`."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import keras

from tfdist.aliases import Data
from tfdist.errors import ConfigError, describe_error, format_value

_SHARDS = ("batches", "items")


class ItemError(Exception):
    """An error of the user's code that made one item, whose message names the item."""


@dataclasses.dataclass(frozen=True, eq=False)
class GeneratorItems:
    """A generator and how several workers share it; created by `from_generator`.

    Attributes:
        generator: The generator.
        shard: As for `from_generator`.
    """

    generator: types.GeneratorType
    shard: str


def from_pydataset(data: keras.utils.PyDataset, shard: str = "batches") -> keras.utils.PyDataset:
    """Declares how several workers share a `keras.utils.PyDataset`.

        model.fit(tfdist.data.from_pydataset(images, shard="items"), epochs=3)

    By default (`"batches"`) item `i` is the batch of step `i`. Every worker computes every item, and its replicas train on their
    shares of it, so results equal those of one process. The items must be the same on all workers. With `"items"` worker `w` of
    `N` computes only the items `i * N + w`, an N-th of the work, and a step trains on `N` items together: results equal those of
    one process with batches of `N` items. In one process, and under parameter servers, where the chief computes all items, it
    makes no difference. A dataset may also set its attribute `shard`.

    Args:
        data: The dataset. Its `workers`, `use_multiprocessing`, `max_queue_size` and hooks keep their meaning on each worker.
        shard: `"batches"` or `"items"`.

    Returns:
        The dataset, whose attribute `shard` is set.

    Raises:
        ConfigError: `data` is not a PyDataset, or `shard` is unknown.

    Examples:
        >>> import keras, numpy as np, tfdist.data
        >>> class Ones(keras.utils.PyDataset):
        ...     def __len__(self):
        ...         return 9
        ...     def __getitem__(self, index):
        ...         return np.ones((4, 2)), np.ones(4)
        >>> tfdist.data.from_pydataset(Ones(), shard="items").shard
        'items'
    """
    if not isinstance(data, keras.utils.PyDataset):
        raise ConfigError(
            f"data must be a keras.utils.PyDataset. Received: {format_value(data)}. For a generator use from_generator."
        )
    data.shard = _checked(shard)
    return data


def from_generator(generator: types.GeneratorType, shard: str = "batches") -> GeneratorItems:
    """Declares how several workers share a generator.

    Each worker reads its own copy of the generator, and all copies must yield the same batches; a sample is compared. By default
    (`"batches"`) the replicas of a worker train on their shares of each batch. With `"items"` worker `w` of `N` keeps only the
    batches `i * N + w`, and a step trains on `N` batches together.

    Args:
        generator: The generator.
        shard: `"batches"` or `"items"`.

    Returns:
        The data, which `fit`, `evaluate` and `predict` accept in place of the generator.

    Raises:
        ConfigError: `generator` is not a generator, or `shard` is unknown.

    Examples:
        >>> import numpy as np, tfdist.data
        >>> data = tfdist.data.from_generator(((np.ones((4, 2)), np.ones(4)) for _ in range(9)), shard="items")
        >>> data.shard
        'items'
    """
    if not isinstance(generator, types.GeneratorType):
        raise ConfigError(
            f"generator must be a generator, such as the result of a function with yield. Received: {format_value(generator)}."
        )
    return GeneratorItems(generator, _checked(shard))


def _checked(shard: Any) -> str:
    if shard not in _SHARDS:
        raise ConfigError(f"shard must be 'batches' or 'items'. Received: {format_value(shard)}.")
    return str(shard)


def unwrapped(data: Data) -> Data:
    """Returns the generator of `from_generator`; returns other data unchanged."""
    if isinstance(data, GeneratorItems):
        return data.generator
    return data


def by_items(data: Data) -> bool:
    """Returns whether each worker takes whole items of the data.

    Raises:
        ConfigError: The attribute `shard` of a PyDataset is unknown.
    """
    is_python = isinstance(data, (keras.utils.PyDataset, GeneratorItems))
    return is_python and _checked(getattr(data, "shard", "batches")) == "items"


class NamedItems(keras.utils.PyDataset):
    """The items of a PyDataset by their index, endless; an error names the item.

    Args:
        data: The PyDataset.
    """

    num_batches = None

    def __init__(self, data: keras.utils.PyDataset):
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data = data

    def __getitem__(self, index: int) -> Any:
        try:
            return self._data[index]
        except Exception as e:
            raise ItemError(f"item {index} of {type(self._data).__name__}: {describe_error(e)}") from e
