"""`StoredData`: examples that are read from storage when a step needs them, in an order that depends on the seed and the epoch."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import tf_internals
from tfdist.data.epoch_order import WINDOW, EpochOrder
from tfdist.data.row_source import RowSource, call, read_rows
from tfdist.errors import ConfigError, format_value

_READS = 4  # batches that are read at once, and batches that wait for their step


class StoredData:
    """Examples in storage, in batches, that `fit`, `evaluate`, `predict` and `validation_data` accept in place of `x`.

    Step k of an epoch has the k-th `batch_size` examples of that epoch's order, split evenly among the replicas, in order; each
    worker reads only its replicas' parts. The last batch of an epoch may be smaller. `fit` shuffles; `evaluate` and `predict`
    read the examples in their stored order.

    Args:
        source: The stored rows.
        batch_size: Examples per step over all replicas.
        seed: The seed of the shuffling.
        shuffle: Whether `fit` shuffles the examples in each epoch.
        map: A function of a batch, or of its parts if it is a tuple, in TensorFlow operations. It is called on each replica's
            part of a batch.
        window: The number of examples that are shuffled among each other (see `EpochOrder`).

    Attributes:
        source: The stored rows.
        batch_size: As the argument.
        num_examples: The number of examples in an epoch.
        steps_per_epoch: The number of batches in an epoch.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        source: RowSource,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        map: Callable[..., Structure] | None = None,
        window: int = WINDOW,
    ):
        faults = check_options(batch_size, seed, map, window)
        if faults:
            raise ConfigError(faults)
        self.source = source
        self.batch_size = int(batch_size)
        self._seed = int(seed)
        self._shuffle = bool(shuffle)
        self._window = int(window)
        self._maps = [] if map is None else [map]
        self.num_examples = int(source.sizes.sum())
        self.steps_per_epoch = -(-self.num_examples // self.batch_size)

    def describe(self) -> str:
        """Returns a text that is equal on all workers, and in the next run of the program, if the examples and their order are."""
        digest = hashlib.blake2b(self.source.identity.encode(), digest_size=6).hexdigest()
        leaves = ", ".join(f"{spec.dtype.name}{list(spec.shape)}" for spec in tf.nest.flatten(self.source.spec))
        return (
            f"{self.num_examples} examples of {leaves} (digest {digest}), batch_size={self.batch_size}, "
            f"seed={self._seed}, shuffle={self._shuffle}, window={self._window}"
        )

    def mapped(self, function: Callable[..., Structure]) -> StoredData:
        """Returns these data with a further function of a batch."""
        data = copy.copy(self)
        data._maps = [*self._maps, function]
        return data

    def in_order(self) -> StoredData:
        """Returns these data without shuffling."""
        data = copy.copy(self)
        data._shuffle = False
        return data

    def dataset(self, epochs: int | None = 1, start_epoch: int = 0) -> tf.data.Dataset:
        """Returns a plain `tf.data` pipeline of batches of `batch_size` examples.

        Args:
            epochs: The number of epochs, each in its order; None makes the dataset endless.
            start_epoch: The first epoch.
        """
        steps = None if epochs is None else epochs * self.steps_per_epoch
        return self.parts(1, [0], start_epoch * self.steps_per_epoch, steps)

    def parts(
        self,
        replicas: int,
        parts: Sequence[int],
        start: int = 0,
        steps: int | None = None,
        make: Callable[[Structure, tf.Tensor], Any] | None = None,
    ) -> tf.data.Dataset:
        """Returns a dataset of some replicas' parts of each step, which reads only these parts.

        Step s, counted over all epochs, is batch `s % steps_per_epoch` of epoch `s // steps_per_epoch`.

        Args:
            replicas: The number of replicas among which a batch is split.
            parts: The parts of each batch, as successive elements.
            start: The first step.
            steps: The number of steps; None makes the dataset endless.
            make: Makes an element from a part and its counts (see `counts_of_part`); None means the part itself. A part that
                has no examples holds the batch's first example.
        """
        source = self.source
        order = EpochOrder(source.sizes, self._seed, self._shuffle, self._window)
        leaves = tf.nest.flatten(source.spec)
        local = len(parts)
        size = self.batch_size
        total = self.num_examples
        length = size // replicas if self.splits_equally(replicas) else None

        def stored(number: np.ndarray) -> list[np.ndarray]:
            step, index = divmod(int(number), local)
            epoch, batch = divmod(step, self.steps_per_epoch)
            first = batch * size
            begin, counts = counts_of_part(min(size, total - first), parts[index], replicas)
            # A part without examples holds the first one of the batch, with which a step computes and which does not count.
            rows = order.examples(epoch, first + begin, first + begin + max(counts[0], 1))
            return [*read_rows(source, *rows), np.array([counts], np.int64)]

        def element(number: tf.Tensor) -> Any:
            # `stored` is a pure function of the number, but not stateless: TensorFlow must not fold it into a constant.
            *columns, counts = tf.numpy_function(stored, [number], [*(spec.dtype for spec in leaves), tf.int64])
            for spec, column in zip(leaves, columns, strict=True):
                column.set_shape([length, *spec.shape])
            batch = tf.nest.pack_sequence_as(source.spec, columns)
            for function in self._maps:
                batch = call(function, batch)
            if make is None:
                return batch
            return make(batch, tf.ensure_shape(counts, [1, 3]))

        if not self._maps:  # only a function of the user may need AutoGraph, whose first use takes half a second
            element = tf.autograph.experimental.do_not_convert(element)
        dataset = tf.data.Dataset.counter(start * local)
        if steps is not None:
            dataset = dataset.take(steps * local)
        dataset = dataset.map(element, num_parallel_calls=_READS, deterministic=True).prefetch(_READS)
        return tf_internals.without_autotuning(dataset)

    def splits_equally(self, replicas: int) -> bool:
        """Returns whether the parts of all batches for `replicas` replicas have the same length."""
        return self.batch_size % replicas == 0 and self.num_examples % self.batch_size == 0

    def specimen(self) -> tf.data.Dataset:
        """Returns a dataset with the specification and the user's functions of `dataset`, which reads no storage."""

        def zeros(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([1, *spec.shape], spec.dtype)

        dataset = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(zeros, self.source.spec)).batch(1)
        for function in self._maps:
            dataset = dataset.map(function, num_parallel_calls=_READS)
        return dataset


def counts_of_part(size: int, part: int, replicas: int) -> tuple[int, list[int]]:
    """Returns where one of `replicas` even parts of a batch of `size` examples begins, and its counts.

    The counts are the examples of the part, those of the batch, and the parts with examples. The lengths of parts differ by at
    most one. A part without examples begins at 0.
    """
    shortest, longer = divmod(size, replicas)
    count = shortest + (part < longer)
    begin = 0
    if count:
        begin = part * shortest + min(part, longer)  # the first `longer` parts have one example more
    return begin, [count, size, min(size, replicas)]


def check_options(
    batch_size: Any,
    seed: Any,
    map: Any,
    window: Any,
    function: str = "map",
) -> list[str]:
    """Returns the errors in the options of `StoredData`; `function` is the name of the argument `map` in the user's call."""
    faults = [
        f"{name} must be a whole number, {least} or more. Received: {format_value(value)}."
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("window", window, 1))
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least
    ]
    if not callable(map) and (map is not None or function != "map"):
        faults.append(f"{function} must be a function of a batch. Received: {format_value(map)}.")
    return faults
