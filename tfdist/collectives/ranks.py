"""Exchange of numbers, texts, decisions and bytes among the tasks of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import own_time
from tfdist.runtime.report.phase import phase
from tfdist.strategy import Strategy

_PIECE = 256  # bytes: a text is padded to a multiple, because TensorFlow traces a function for each length
# Bytes: a longer content is sent in several messages, so that no rank needs a second copy of it.
_LONGEST_MESSAGE = 1 << 24


class Ranks:
    """Exchanges numbers, texts and bytes among the tasks of a strategy. Every method is a collective: every rank must call it.

    Attributes:
        rank: This task's rank.
        size: The number of tasks.
        names: The names of all tasks, for messages.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rank: int, names: Sequence[str]):
        self._strategy = strategy
        self.names = names
        self.rank = rank
        self.size = len(names)
        self._sum = tf.function(lambda values: strategy.reduce("SUM", values), autograph=False)

    @property
    def is_chief(self) -> bool:
        """Returns whether this is the task that decides and writes files."""
        return self.rank == 0

    def gather(self, *numbers: float) -> np.ndarray:
        """Returns every rank's numbers, `[size, len(numbers)]` float64."""
        if self.size == 1:
            return np.array([numbers], np.float64)
        row = np.zeros((self.size, len(numbers)), np.float64)
        row[self.rank] = numbers
        with phase("exchange"):
            return self._reduce(row).numpy()

    def broadcast_scalar(self, value: float) -> float:
        """Returns the chief's number."""
        return float(self.gather(float(value))[0, 0])

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank."""
        return bool(self.gather(float(value)).any())

    def gather_texts(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        encoded = text.encode(errors="replace")
        lengths = self.gather(len(encoded)).astype(int)[:, 0]
        if not lengths.any():
            return [""] * self.size
        padded = encoded.ljust(-(-int(lengths.max()) // _PIECE) * _PIECE)
        rows = self.gather(*padded).astype(np.uint8)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def agree(self, reason: str) -> str:
        """Returns the first non-empty reason of all ranks, or an empty text. Appends the names of its tasks unless all tasks have it."""
        reasons = self.gather_texts(reason)
        first = next(filter(None, reasons), "")
        tasks = [name for name, other in zip(self.names, reasons, strict=True) if other == first]
        return first if len(tasks) == self.size else f"{first} ({', '.join(tasks)})"

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(0.0)

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value."""
        if self.size == 1:
            return value
        with phase("exchange"):
            return self._reduce(value if self.is_chief else tf.zeros_like(value))

    def send(self, source: int, content: Sequence[np.ndarray], target: int | None = None) -> np.ndarray | None:
        """Sends bytes from one rank to another, or to all others.

        The messages pass through every rank, as a sum with zeros. `content` are the arrays of uint8 on the rank that sends, empty on others.
        `target` None means all ranks except `source`. Returns the bytes, as uint8, on a rank that receives; None on the others.
        """
        total = int(self.gather(float(sum(map(len, content))))[source, 0])
        receives = self.rank != source and target in (None, self.rank)
        received = np.empty(total if receives else 0, np.uint8)
        messages = _messages(content)
        for start in range(0, total, _LONGEST_MESSAGE):
            length = min(total - start, _LONGEST_MESSAGE)
            # The lengths of last messages are powers of two, because TensorFlow traces a function for each length.
            padded = np.zeros(max(1 << (length - 1).bit_length(), _PIECE), np.uint8)
            if self.rank == source:
                padded[:length] = next(messages)
            with phase("exchange"):
                # Collectives have no uint8, and GPUs keep int32 on the host.
                result = self._reduce(padded.view(np.int64))
            if receives:
                received[start : start + length] = result.numpy().view(np.uint8)[:length]
        return received if receives else None

    def _reduce(self, value: Any) -> tf.Tensor:
        replicas = self._strategy.num_replicas_in_sync // self.size

        def once(context: Any) -> tf.Tensor:
            first = context.replica_id_in_sync_group % replicas == 0
            return tf.convert_to_tensor(value) if first else tf.zeros_like(value)

        values = self._strategy.experimental_distribute_values_from_function(once)
        # Calls a concrete function: `self._sum` would warn the user that it is traced for several shapes.
        total = self._sum.get_concrete_function(values)
        with own_time.waiting():
            return total(values)


def ranks_of(strategy: Strategy) -> Ranks:
    """Returns the tasks that train together."""
    if strategy.cluster_task is None:
        return Ranks(strategy, 0, ["worker-0"])
    cluster, task = strategy.cluster_task
    tasks = cluster.training_tasks()
    return Ranks(strategy, tasks.index(task), list(map(str, tasks)))


def _messages(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the bytes of all arrays, `_LONGEST_MESSAGE` at a time."""
    message = np.empty(_LONGEST_MESSAGE, np.uint8)
    filled = 0
    for array in arrays:
        start = 0
        while start < len(array):
            length = min(len(array) - start, _LONGEST_MESSAGE - filled)
            message[filled : filled + length] = array[start : start + length]
            start += length
            filled += length
            if filled == _LONGEST_MESSAGE:
                yield message
                filled = 0
    if filled:
        yield message[:filled]
