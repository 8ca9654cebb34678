"""Starts a dataset at an element, or at a later pass."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import tensorflow as tf

from tfdist.compat import tf_internals
from tfdist.compat.tf_internals import CacheDataset, RandomDataset, RepeatDataset, ShuffleDataset
from tfdist.data.graph import walk

STARTING_AT = "_tfdist_starting_at"  # an attribute of the datasets of `epochs`


def skip(dataset: tf.data.Dataset, elements: int) -> tf.data.Dataset:
    """Returns a dataset without its first elements; that of `epochs` is made anew, and does not load them."""
    return getattr(dataset, STARTING_AT, dataset.skip)(elements)


def replay(dataset: tf.data.Dataset, passes: int, reads: bool = True) -> None:
    """Begins passes over a dataset, so that the next one shuffles as the one after them.

    Args:
        dataset: The dataset.
        passes: How many.
        reads: Whether to read the first one to its end if it filled a cache, which holds the order of that pass.
    """
    if passes and reads and any(isinstance(reshuffling, CacheDataset) for reshuffling in walk(dataset)):
        collections.deque(iter(dataset), maxlen=0)
        passes -= 1
    for reshuffling, times in _reshuffling_datasets(dataset, passes, passes):
        for _ in range(times):
            iter(
                reshuffling
            )  # moves its own order alone: it begins the dataset that it is made from when it is first read


def _reshuffling_datasets(dataset: tf.data.Dataset, begun: int, read: int) -> Iterator[tuple[tf.data.Dataset, int]]:
    """Yields the datasets that come in another order each time they begin, and how often they begin.

    Args:
        dataset: A dataset.
        begun: How many iterators of it are made.
        read: How many of them are read.
    """
    if isinstance(dataset, (ShuffleDataset, RandomDataset)):
        yield dataset, begun
        begun = read
    if isinstance(dataset, RepeatDataset):
        count = max(tf_internals.repeat_count(dataset), 1)
        begun, read = begun + read * count, read * count  # it starts again even after the last time
    for source in tf_internals.inputs(dataset):
        yield from _reshuffling_datasets(source, begun, read)
