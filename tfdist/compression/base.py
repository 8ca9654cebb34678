"""What a compressor is: a function of gradients and state, which yields the exchanges that it needs."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compression.comm import Counter
from tfdist.compression.exchange import AllReduce, Exchange, Member, Reduced, together

_LEAST = 1024  # numbers of a variable that is worth it


class Slot(NamedTuple):
    """State that a compressor keeps for a variable, float32.

    Attributes:
        name: Its name.
        shape: Its shape.
        shared: Whether all ranks have the same; otherwise each has its own.
        initial: Returns its first value, given the shape and the number of the variable among all.
    """

    name: str
    shape: tuple[int, ...]
    shared: bool = False
    initial: Callable[[tuple[int, ...], int], Any] = lambda shape, number: tf.zeros(shape)


class Rows:
    """How rows of numbers travel that are gathered, not summed, as those of an embedding's gradient are."""

    def pack(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns `[rows, words]`, int32 or float32, of `[rows, width]` float32."""
        return rows

    def unpack(self, packed: tf.Tensor, width: int) -> tf.Tensor:
        """Returns what `pack` was given, as far as it came through."""
        return packed


class Compressor(abc.ABC):
    """Sums values over all ranks with fewer bytes.

    Attributes:
        rows: How rows travel.
        begins: How many updates it leaves uncompressed at first.
        suits_adaptive: Whether optimizers do well with it that divide by what gradients have been, as Adam.
    """

    rows = Rows()
    begins = 0
    suits_adaptive = True

    def of(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Returns what compresses the gradient of a variable: this one, or for vectors and small ones nothing."""
        return self if len(shape) > 1 and math.prod(shape) >= _LEAST else NONE

    def slots(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Returns the state that a value of this shape has."""
        return ()

    @abc.abstractmethod
    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        """Yields requests, and is sent their answers.

        Args:
            values: This rank's, float32, of static shapes; the same shapes on all ranks.
            states: Each value's state, as `slots` describes it.
            member: This rank.

        Returns:
            `Reduced`.
        """

    def plan(self, shapes: Sequence[tuple[int, ...]] | Mapping[str, tuple[int, ...]], num_replicas: int) -> int:
        """Returns the bytes that each rank sends for a step, by the collectives' formulas (see `comm.Counter`).

        Args:
            shapes: Of the variables with dense gradients, float32; by name where the compressor looks at names.
            num_replicas: The number of ranks.
        """
        named = shapes if isinstance(shapes, Mapping) else {str(number): shape for number, shape in enumerate(shapes)}
        counter = Counter(num_replicas)
        with tf.Graph().as_default():
            layout = Layout(self, list(named.items()))
            values = [tf.zeros(shape) for shape in named.values()]
            states = [tuple(tf.zeros(slot.shape) for slot in slots) for slots in layout.slots]
            (member,) = counter.members(tf.zeros([], tf.int64))
            counter.run([layout.exchange(values, states, member)])
        return round(counter.sent)

    @property
    def name(self) -> str:
        """Its name and arguments, for people."""
        return type(self).__name__


class NoCompression(Compressor):
    """Sums values as they are."""

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        totals = yield AllReduce(values)
        return Reduced(totals, list(values), list(states))


NONE = NoCompression()


class Layout:
    """Which compressor each of some variables has.

    Args:
        compressor: What says so.
        variables: The variables' names and shapes.

    Attributes:
        shapes: The shape of each variable.
        compressors: The compressor of each.
        slots: The state of each variable.
    """

    def __init__(self, compressor: Compressor, variables: Sequence[tuple[str, tuple[int, ...]]]):
        self.shapes = [tuple(shape) for _, shape in variables]
        self.compressors = [compressor.of(name, tuple(shape)) for name, shape in variables]
        self.slots = [c.slots(tuple(shape)) for c, (_, shape) in zip(self.compressors, variables, strict=True)]

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        states: Sequence[tuple[tf.Tensor, ...]],
        member: Member,
        variables: Sequence[int] | None = None,
    ) -> Exchange:
        """One exchange of all compressors' together, as `Compressor.exchange`.

        Args:
            values: This rank's.
            states: Each value's state.
            member: This rank.
            variables: The variables that have values, by number; None means all.
        """
        numbers = range(len(self.compressors)) if variables is None else variables
        places: dict[Compressor, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(self.compressors[number], []).append(place)
        results = yield from together(
            [c.exchange([values[p] for p in mine], [states[p] for p in mine], member) for c, mine in places.items()]
        )
        whole = Reduced(list(values), list(values), list(states))
        for mine, reduced in zip(places.values(), results, strict=True):
            for mine_all, into in zip(reduced, whole, strict=True):
                for place, each in zip(mine, mine_all, strict=True):
                    into[place] = each
        return whole
