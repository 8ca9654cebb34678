"""The base class of compressors: functions of gradients and state, which yield exchanges."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.collectives.communicator import ByteCounter, Communicator
from tfdist.collectives.requests import AllReduce, Exchange, RankContext, ReduceResult, fuse
from tfdist.compression.buckets import assign_buckets, join_results, merge_results, part_sizes, split, split_state
from tfdist.config.constraints import field_faults, option_type, type_fault
from tfdist.errors import ConfigError

_MIN_ELEMENTS = 1024  # minimum number of elements of a variable that is compressed


class StateSpec(NamedTuple):
    """State that a compressor keeps for a variable, float32.

    Attributes:
        name: Its name.
        shape: Its shape.
        shared: Whether the state is equal on all ranks; otherwise each rank has its own.
        initial: Returns the initial value from the shape and the variable's index.
    """

    name: str
    shape: tuple[int, ...]
    shared: bool = False
    initial: Callable[[tuple[int, ...], int], Any] = lambda shape, number: tf.zeros(shape)


class RowCodec:
    """The encoding of rows that are gathered instead of summed, such as the rows of an embedding's gradient."""

    def pack(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns `[rows, words]`, int32 or float32, of `[rows, width]` float32."""
        return rows

    def unpack(self, packed: tf.Tensor, width: int) -> tf.Tensor:
        """Returns the input of `pack`, up to the loss of the encoding."""
        return packed


@dataclasses.dataclass(frozen=True)
class Compressor(abc.ABC):
    """A way to sum values over all ranks with fewer bytes. Compressors of the same class and arguments are equal.

    Examples:
        >>> import tfdist
        >>> trainer = tfdist.Trainer("mirrored", compression="int8")
        >>> trainer.compression.block
        256
    """

    def __post_init__(self) -> None:
        """Validates the arguments against the ranges of their `option`.

        Raises:
            ConfigError: Arguments are out of range; the error lists all of them.
        """
        faults: list[str] = []
        for field in dataclasses.fields(self):
            if "faults" in field.metadata:
                where = f"{type(self).__name__}: {field.name}"
                value = getattr(self, field.name)
                fault = type_fault(where, value, option_type(field))
                faults += [fault] if fault else field_faults(where, value, field)
        if faults:
            raise ConfigError(faults)

    @property
    def row_codec(self) -> RowCodec:
        """The encoding of gathered rows."""
        return RowCodec()

    @property
    def start_step(self) -> int:
        """The number of updates at the start that are not compressed."""
        return 0

    @property
    def supports_adaptive_optimizers(self) -> bool:
        """True if the compressor works with adaptive optimizers such as Adam."""
        return True

    @property
    def granularity(self) -> int:
        """The granularity in elements: gradients and their state may be split at multiples of it.

        0 means that gradients must not be split.
        """
        return 0

    def for_variable(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Returns the compressor of a variable's gradient: this one, or `NoCompression` for vectors and small variables."""
        is_compressed = len(shape) > 1 and math.prod(shape) >= _MIN_ELEMENTS
        return self if is_compressed else NONE

    def state_specs(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Returns the specs of the state for a value of this shape."""
        return ()

    @abc.abstractmethod
    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        """Yields requests, and receives their answers through `send`.

        Args:
            values: This rank's values, float32, with static shapes that are equal on all ranks.
            states: Each value's state, as `state_specs` describes it.
            member: This rank.

        Returns:
            `ReduceResult`.
        """

    def bytes_per_step(
        self, shapes: Sequence[tuple[int, ...]] | Mapping[str, tuple[int, ...]], num_replicas: int
    ) -> int:
        """Returns the bytes that each rank sends for a step, by the collectives' formulas (see `ByteCounter`).

        Args:
            shapes: The shapes of the float32 variables with dense gradients; by name if the compressor depends on names.
            num_replicas: The number of ranks.
        """
        named = shapes if isinstance(shapes, Mapping) else {str(number): shape for number, shape in enumerate(shapes)}
        counter = ByteCounter(num_replicas)
        with tf.Graph().as_default():
            layout = BucketedReduction(self, list(named.items()))
            values = [tf.zeros(shape) for shape in named.values()]
            states = [tuple(tf.zeros(slot.shape) for slot in slots) for slots in layout.slots]
            (member,) = counter.contexts(tf.zeros([], tf.int64))
            counter.run([layout.exchange(values, states, member)])
        return round(counter.sent)

    @property
    def description(self) -> str:
        """The compressor's name and non-default arguments, for messages."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                required = field.default is dataclasses.MISSING
                text = value.description if isinstance(value, Compressor) else repr(value)
                shown.append(text if required else f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


class NoCompression(Compressor):
    """The sum without compression.

    Examples:
        >>> from tfdist.compression import NoCompression
        >>> NoCompression() == NoCompression()
        True
    """

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        totals = yield AllReduce(values)
        return ReduceResult(totals, list(values), list(states))


NONE = NoCompression()


def _checked(
    compressor: Compressor,
    values: Sequence[tf.Tensor],
    states: Sequence[tuple[tf.Tensor, ...]],
    member: RankContext,
) -> Exchange:
    """Runs a compressor's exchange and checks its result."""
    where = f"{type(compressor).__name__}.exchange must "
    exchange = compressor.exchange(values, states, member)
    if not isinstance(exchange, Generator):
        raise ConfigError(
            f"{where}yield requests, such as `totals = yield AllReduce(values)`, and return a ReduceResult."
        )
    result = yield from exchange
    if not isinstance(result, ReduceResult):
        raise ConfigError(
            f"{where}return a ReduceResult(sums, contributions, states). Received: {type(result).__name__}."
        )
    expected = [value.shape for value in values]
    for what, tensors in (("sums", result.sums), ("contributions", result.contributions)):
        shapes = [tf.TensorShape(getattr(tensor, "shape", None)) for tensor in tensors]
        if len(shapes) != len(expected) or not all(map(tf.TensorShape.is_compatible_with, shapes, expected)):
            raise ConfigError(
                f"{where}return {what} of its values' shapes, {list(map(tuple, expected))}. Received: "
                f"{list(map(str, shapes))}."
            )
    if len(result.states) != len(states):
        raise ConfigError(f"{where}return a state for each of {len(states)} values. Received: {len(result.states)}.")
    return result


class BucketedReduction:
    """The compressors of all variables, and the reduction of their gradients in buckets.

    `variables` are their names and shapes.

    Attributes:
        shapes: The shape of each variable.
        compressors: The compressor of each variable.
        slots: The specs of each variable's state.
    """

    def __init__(self, compressor: Compressor, variables: Sequence[tuple[str, tuple[int, ...]]]):
        self.shapes = [tuple(shape) for _, shape in variables]
        self.compressors = [compressor.for_variable(name, tuple(shape)) for name, shape in variables]
        self._encoded_bytes: dict[tuple[Compressor, tuple[int, ...]], int] = {}
        self.slots = [c.state_specs(tuple(shape)) for c, (_, shape) in zip(self.compressors, variables, strict=True)]

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        states: Sequence[tuple[tf.Tensor, ...]],
        member: RankContext,
        variables: Sequence[int] | None = None,
    ) -> Exchange:
        """Runs the exchanges of all compressors as one; see `Compressor.exchange`.

        `variables` are the indices of the values' variables; None means all variables.
        """
        numbers = range(len(self.compressors)) if variables is None else variables
        indices_of: dict[Compressor, list[int]] = {}
        for index, number in enumerate(numbers):
            indices_of.setdefault(self.compressors[number], []).append(index)
        exchanges = []
        for compressor, indices in indices_of.items():
            chosen_values = [values[index] for index in indices]
            chosen_states = [states[index] for index in indices]
            exchanges.append(_checked(compressor, chosen_values, chosen_states, member))
        results = yield from fuse(exchanges)
        return merge_results(zip(indices_of.values(), results, strict=True), len(values))

    def run(
        self,
        group: Communicator,
        values: Sequence[Sequence[tf.Tensor]],
        states: Sequence[Sequence[tuple[tf.Tensor, ...]]],
        members: Sequence[RankContext],
        variables: Sequence[int] | None = None,
        bucket_bytes: int = 0,
    ) -> list[ReduceResult]:
        """Runs one exchange for each bucket of gradients; the exchanges do not wait for each other.

        `members` are the contexts of this process's ranks; `values` and `states` have for each of them what `exchange` takes.
        `bucket_bytes` is the maximum of a bucket: of gradients, or of encoded gradients if the compressor cannot split them. 0 means
        one bucket.
        """
        numbers = list(range(len(self.compressors)) if variables is None else variables)
        cuts = [part_sizes(math.prod(self.shapes[n]), self.compressors[n].granularity, bucket_bytes) for n in numbers]
        # Large gradients are split first: from here to `join_results` an index is that of a part, and `owners` has its variable.
        owners = [number for number, counts in zip(numbers, cuts, strict=True) for _ in counts]
        parts = [[part for pair in zip(v, cuts, strict=True) for part in split(*pair)] for v in values]
        part_states = [[part for pair in zip(s, cuts, strict=True) for part in split_state(*pair)] for s in states]
        sizes = [0] * len(owners)
        if bucket_bytes:
            sizes = list(map(self._size, owners, parts[0]))
        results_by_rank: list[list[tuple[list[int], ReduceResult]]] = [[] for _ in members]
        for lane, bucket in enumerate(assign_buckets(sizes, bucket_bytes)):
            exchanges = []
            for rank_parts, rank_states, member in zip(parts, part_states, members, strict=True):
                bucket_values = [rank_parts[index] for index in bucket]
                bucket_states = [rank_states[index] for index in bucket]
                exchanges.append(self.exchange(bucket_values, bucket_states, member, [owners[i] for i in bucket]))
            for results, reduced in zip(results_by_rank, group.run(exchanges, lane), strict=True):
                results.append((bucket, reduced))
        shapes = [self.shapes[number] for number in numbers]
        return [join_results(merge_results(results, len(sizes)), cuts, shapes) for results in results_by_rank]

    def _size(self, number: int, part: tf.Tensor) -> int:
        """Returns the bytes that a variable's gradient, or a part of it, adds to a bucket."""
        compressor = self.compressors[number]
        shape = self.shapes[number]
        if compressor == NONE or compressor.granularity:
            return part.shape.num_elements() * part.dtype.size
        key = compressor, shape
        if key not in self._encoded_bytes:
            self._encoded_bytes[key] = compressor.bytes_per_step([shape], 2)  # with two ranks, each sends its data once
        return self._encoded_bytes[key]
