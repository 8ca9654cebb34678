"""Functions that start a dataset at a later element or pass."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import tensorflow as tf

from tfdist.compat import tf_internals
from tfdist.compat.tf_internals import CacheDataset, RandomDataset, RepeatDataset, ShuffleDataset
from tfdist.data.graph import walk

STARTING_AT = "_tfdist_starting_at"  # an attribute of the datasets of `epochs`


def skip(dataset: tf.data.Dataset, elements: int) -> tf.data.Dataset:
    """Returns a dataset without its first elements. A dataset of `epochs` is created again and does not load them."""
    return getattr(dataset, STARTING_AT, dataset.skip)(elements)


def replay(dataset: tf.data.Dataset, passes: int, reads: bool = True) -> None:
    """Begins passes over a dataset, so that the next pass has the order that follows after `passes` passes.

    With `reads`, reads the first pass to its end if the dataset has a cache, which keeps the order of that pass.
    """
    if passes and reads and any(isinstance(reshuffling, CacheDataset) for reshuffling in walk(dataset)):
        collections.deque(iter(dataset), maxlen=0)
        passes -= 1
    for reshuffling, times in _reshuffling_datasets(dataset, passes, passes):
        for _ in range(times):
            # Advances only the order of this dataset: its input begins when the iterator is first read.
            iter(reshuffling)


def _reshuffling_datasets(dataset: tf.data.Dataset, begun: int, read: int) -> Iterator[tuple[tf.data.Dataset, int]]:
    """Yields the datasets whose order changes with each iterator, and how often an iterator of each begins.

    Of `dataset`, `begun` iterators are created, and `read` of these are read.
    """
    if isinstance(dataset, (ShuffleDataset, RandomDataset)):
        yield dataset, begun
        begun = read
    if isinstance(dataset, RepeatDataset):
        read *= max(tf_internals.repeat_count(dataset), 1)
        begun += read  # `repeat` opens its input once more after the last repetition
    for source in tf_internals.inputs(dataset):
        yield from _reshuffling_datasets(source, begun, read)
