"""The batches of a generator that several loops read, one after another.

TensorFlow and the Trainer read ahead. The batches that a loop has read and not used belong to the generator, and the next loop
over the same generator begins with them.
"""

from __future__ import annotations

import collections
import threading
import types
import weakref
from collections.abc import Iterator

from tfdist.aliases import Structure


class GeneratorBatches:
    """The position of all loops in one generator, and the batches that were read ahead. The main thread calls all methods but `take`.

    Attributes:
        used: The number of batches that loops have used, or are about to use.
    """

    def __init__(self) -> None:
        self.used = 0
        self._ahead: collections.deque[Structure] = collections.deque()  # the last batches of those that were read
        self._count = 0  # batches that were read
        self._has_ended = False
        self._newest_pass = object()
        self._lock = threading.Lock()  # held while the generator runs; the main thread must not wait for it

    def begin(self) -> tuple[object, int]:
        """Begins a pass at the first batch that is not used, and ends all earlier passes. Returns an identifier and this batch's number."""
        if self._has_ended:  # the last execution had fewer steps than planned
            self.used = min(self.used, self._count)
        self._newest_pass = object()
        return self._newest_pass, self.used

    def is_newest(self, identifier: object) -> bool:
        """Returns whether no pass has begun after this one."""
        return identifier is self._newest_pass

    def take(self, generator: types.GeneratorType, identifier: object, number: int) -> list[Structure]:
        """Returns a list of the batch with this number; an empty list if the generator or the pass has ended, or the batch was dropped. Threads may call it."""
        with self._lock:
            if not self.is_newest(identifier):
                return []
            while self._count <= number:
                try:
                    batch = next(generator)
                except StopIteration:
                    self._has_ended = True
                    return []
                self._ahead.append(batch)
                self._count += 1
            first = self._count - len(self._ahead)
            if number < first:
                return []
            batch = self._ahead[number - first]
            # Batches that are read and not used stay: the next loop begins with them.
            for _ in range(min(self.used, number + 1) - first):
                self._ahead.popleft()
            return [batch]


class GeneratorReading:
    """The passes of one loop over a generator. The first pass begins at once.

    Args:
        generator: The generator.

    Attributes:
        shared: The batches of the generator, for all loops.
    """

    def __init__(self, generator: types.GeneratorType):
        self._generator = generator
        self.shared = batches_of(generator)
        self.begin()

    def begin(self) -> None:
        """Begins a pass at the first batch that no loop has used."""
        self._pass = self.shared.begin()

    @property
    def is_interrupted(self) -> bool:
        """Returns whether another loop has read the generator since the pass began."""
        return not self.shared.is_newest(self._pass[0])

    def use(self, count: int) -> None:
        """Records that the loop will use further batches."""
        self.shared.used += count

    def batches(self) -> Iterator[Structure]:
        """Yields the batches of the current pass, which threads may read ahead."""
        identifier, number = self._pass
        while taken := self.shared.take(self._generator, identifier, number):
            yield taken[0]
            number += 1


# A value must not refer to its generator, which would never be freed.
_batches: weakref.WeakKeyDictionary[types.GeneratorType, GeneratorBatches] = weakref.WeakKeyDictionary()


def batches_of(generator: types.GeneratorType) -> GeneratorBatches:
    """Returns the batches of a generator, the same object in each call."""
    return _batches.setdefault(generator, GeneratorBatches())
