"""The update of an optimizer whose slots are split over the processes: each updates its pieces, then all gather the weights.

The variables are in buckets, as in the sum of gradients. Each process holds one part of a bucket: of some variables all elements, of
others a range. The reduction gives each process the sum for its part. The user's optimizer updates it; its slots have the shapes of the
pieces. Replicas of one process share its pieces.

The bits are those of an update of whole variables: the optimizer updates each element independently, and the sum of gradients is the same.
Sparse gradients become dense pieces, which RMSprop, Adagrad, Adadelta and Ftrl may round differently from rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.collectives.communicator import DeviceCommunicator, communicator_for
from tfdist.compat import keras_internals, model_features
from tfdist.compat.piece_optimizer import Piece, PieceOptimizer
from tfdist.compression.base import NONE
from tfdist.compression.buckets import assign_buckets
from tfdist.config import relations
from tfdist.gradients import gradient_lists
from tfdist.gradients.reduction import bucket_bytes, gather_deduplicated_rows
from tfdist.runtime.log import logger
from tfdist.sharding.split import Split, split_bucket

ELEMENTWISE = model_features.ELEMENTWISE
# A variable is cut at multiples of a CPU's largest vector: Eigen rounds rsqrt differently in elements that do not fill a vector.
_ALIGNMENT = 32


class ShardedUpdate:
    """The update of an optimizer's variables by pieces, in cross-replica context."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy):
        self._group = communicator_for(strategy)
        asked = {"shard_optimizer": "", **model_features.of_optimizer(optimizer)}
        if isinstance(self._group, DeviceCommunicator):
            asked["gpus_of_workers"] = ""
        relations.check(asked, "shard_optimizer")
        self._optimizer = optimizer
        self._strategy = strategy
        self._wire_dtype = tf.as_dtype(strategy.config.weights_dtype)
        self._process = self._group.ranks[0] // len(self._group.ranks)
        self._buckets: list[_Bucket] = []
        self._pieces: list[Piece] = []
        self._keras = PieceOptimizer(optimizer, self._piece_of)

    @property
    def clips_by_norm(self) -> bool:
        """True if gradients are clipped by a norm. It is computed from whole gradients, as its bits depend on the order of the sum."""
        return bool(self._optimizer.clipnorm or self._optimizer.global_clipnorm)

    def build(self, variables: Variables) -> None:
        """Builds the optimizer with slots for this process's pieces."""
        if not self._optimizer.built:
            self._cut_variables(variables)
            type(self._optimizer).build(self._optimizer, list(variables))
            self._report()

    def split(self) -> None:
        """Splits the slots of an optimizer that is built already, such as one of a loaded model."""
        self._cut_variables(keras_internals.trainable_variables(self._optimizer))
        self._keras.split()
        self._report()

    def _cut_variables(self, variables: Variables) -> None:
        most_bytes = bucket_bytes(self._strategy)
        if self._group.processes == 1:
            most_bytes = (
                1  # one variable in each bucket, so that values are not copied into buckets that nobody receives
            )
        self._buckets = list(_buckets(variables, self._group.processes, most_bytes))
        held = {number: split for bucket in self._buckets for number, split in bucket.splits.items()}
        for number, variable in enumerate(variables):
            self._pieces.append(Piece(self._optimizer, variable, held[number], self._process))
        if self._wire_dtype != tf.float32:
            self._keras.add_masters(self._pieces)

    def _piece_of(self, variable: keras.Variable) -> Piece | None:
        return next((piece for piece in self._pieces if piece.variable is variable), None)

    def _report(self) -> None:
        if self._process == 0 and self._pieces:
            logger.info(self._description())

    def _description(self) -> str:
        """Returns a sentence about the bytes of the slots."""
        own_bytes = sum(slot.value.dtype.size * slot.shape.num_elements() for slot in self._keras.slots)
        own = f"optimizer state: {own_bytes / 1e6:.3g} MB"
        if self._group.processes == 1:
            return f"{own} once instead of on each of {len(self._group.ranks)} devices"
        held = sum(piece.elements * piece.dtype.size for piece in self._pieces)
        total = sum(piece.variable.value.shape.num_elements() * piece.dtype.size for piece in self._pieces)
        all_bytes = own_bytes * total / held  # slots have the shapes of the pieces
        return f"{own} on each of {self._group.processes} workers instead of {all_bytes / 1e6:.3g}"

    def reduce_scatter(self, grads: Sequence[Gradient], variables: Variables) -> list[tf.Tensor]:
        """Returns this process's piece of the gradients' sum over all replicas, for each variable."""
        local = self._strategy.experimental_local_results
        numbers = self._numbers(variables)
        values = dict(zip(numbers, map(local, grads), strict=True))
        sparse = [number for number in numbers if isinstance(values[number][0], tf.IndexedSlices)]
        summed: dict[int, tf.Tensor] = {}
        for lane, bucket in enumerate(self._buckets):
            chosen = [number for number in bucket.splits if number in values and number not in sparse]
            if chosen:
                vectors = [
                    bucket.pack({number: values[number][replica] for number in chosen})
                    for replica in range(len(self._group.ranks))
                ]
                part = self._group.reduce_scatter(vectors, lane)
                summed |= bucket.split(part, chosen, self._process)
        step = tf.cast(self._optimizer.iterations, tf.int64)
        for number in sparse:
            rows = gather_deduplicated_rows(self._group, values[number], NONE.row_codec, step)[:1]
            (rows,) = gradient_lists.deduplicate_rows(rows)  # rows of several replicas may have the same id
            summed[number] = self._cut(number, tf.convert_to_tensor(rows))
        return [summed[number] for number in numbers]

    def update(self, grads: Sequence[Gradient], variables: Variables, are_pieces: bool) -> None:
        """Clips and updates this process's pieces, and sets the variables of all replicas to the pieces of all processes.

        `grads` are the summed gradients, or their pieces (`are_pieces`). A collective.
        """
        local = self._strategy.experimental_local_results
        numbers = self._numbers(variables)
        grads = keras_internals.clip_method(self._optimizer)([local(grad)[0] for grad in grads])
        if not are_pieces:
            grads = [self._cut(*pair) for pair in zip(numbers, map(tf.convert_to_tensor, grads), strict=True)]
        grads_of_pieces = {
            number: grad for number, grad in zip(numbers, grads, strict=True) if self._pieces[number].elements
        }
        self._read(numbers)
        self._keras.update(list(grads_of_pieces.values()), [self._pieces[number] for number in grads_of_pieces])
        for lane, bucket in enumerate(self._buckets):
            updated = {number: self._kept(self._pieces[number]) for number in bucket.splits if number in numbers}
            if updated:
                self._gather(bucket, updated, lane)
        self._forget()

    def move_averages(self) -> None:
        """Updates this process's pieces of the moving averages of all variables."""
        self._read(range(len(self._pieces)))
        self._keras.move_averages(self._pieces)
        self._forget()

    def overwrite(self, variables: Variables) -> None:
        """Sets the variables of all replicas to their moving averages. A collective.

        Keras passes `variables`: those of the optimizer, or at the end of `fit` the model's.
        """
        averages = self._keras.averages
        for lane, bucket in enumerate(self._buckets):
            self._gather(bucket, {number: averages[number] for number in bucket.splits}, lane)

    def _read(self, numbers: Iterable[int]) -> None:
        """Gives pieces the present values of their elements."""
        for number in numbers:
            piece = self._pieces[number]
            component = self._strategy.experimental_local_results(piece.variable.value)[0]
            piece.value = self._cut(number, component.read_value())
            if piece.master is not None:
                # Weights that are not the rounded master were set by something else, such as a constraint or `set_weights`.
                is_rounded = piece.value == self._rounded(piece.master.value)
                piece.value = tf.where(is_rounded, piece.master.value, piece.value)

    def _kept(self, piece: Piece) -> tf.Tensor:
        """Returns a piece's updated values as they are sent; stores those of float32."""
        if piece.master is None:
            return piece.value
        piece.master.value.assign(piece.value)
        return tf.cast(piece.value, self._wire_dtype)

    def _rounded(self, values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(values, self._wire_dtype), values.dtype)

    def _forget(self) -> None:
        """Removes the values of all pieces: only slots may stay in memory."""
        for piece in self._pieces:
            piece.value = None

    def _gather(self, bucket: _Bucket, values: Mapping[int, tf.Tensor], lane: int) -> None:
        """Sets variables on all replicas to the values of the pieces of all processes."""
        gathered = self._group.gather_parts(bucket.join(values, self._process), lane + 1)
        for number, flat in bucket.unpack(gathered, list(values)).items():
            variable = self._pieces[number].variable
            whole = tf.cast(tf.reshape(flat, variable.shape), variable.dtype)
            for component in self._strategy.experimental_local_results(variable.value):
                component.assign(whole)

    def _cut(self, number: int, whole: tf.Tensor) -> tf.Tensor:
        """Returns this process's piece of a variable's value or gradient."""
        piece = self._pieces[number]
        cut = tf.reshape(whole, [-1])[piece.index]
        cut.set_shape([piece.elements])  # rows of an embedding have no static shape
        return cut

    def _numbers(self, variables: Variables) -> list[int]:
        return [keras_internals.variable_index(self._optimizer, variable) for variable in variables]


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Variables whose pieces travel together.

    Attributes:
        splits: The ranges of each variable, by the variable's number.
        processes: The number of processes.
    """

    splits: Mapping[int, Split]
    processes: int

    def pack(self, values: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Returns a vector with a part of equal length for each process: its pieces of the values."""
        flat = {number: tf.reshape(value, [-1]) for number, value in values.items()}
        joined: list[tf.Tensor] = []
        for process in range(self.processes):
            held = {number: vector[self.splits[number].indices[process]] for number, vector in flat.items()}
            joined += self._padded(held, process)
        return tf.concat(joined, 0)  # the only copy: slices share the memory of the values

    def join(self, pieces: Mapping[int, tf.Tensor], process: int) -> tf.Tensor:
        """Returns a process's part: its pieces of some variables, each padded, and padding."""
        return tf.concat(self._padded(pieces, process), 0)

    def _padded(self, pieces: Mapping[int, tf.Tensor], process: int) -> list[tf.Tensor]:
        """Returns the pieces and paddings of a process's part. Each piece begins at a multiple of the alignment."""
        padded: list[tf.Tensor] = []
        for number, piece in pieces.items():
            length = self.splits[number].size(process)
            padded += [piece, tf.zeros([-length % _ALIGNMENT], piece.dtype)]
        end = self._width(list(pieces)) - self._end(list(pieces), process)
        return [*padded, tf.zeros([end], padded[0].dtype)]

    def split(self, part: tf.Tensor, chosen: Sequence[int], process: int) -> dict[int, tf.Tensor]:
        """Returns the pieces in a process's part."""
        found = {}
        start = 0
        for number in chosen:
            length = self.splits[number].size(process)
            found[number] = part[start : start + length]
            start += _aligned(length)
        return found

    def unpack(self, vector: tf.Tensor, chosen: Sequence[int]) -> dict[int, tf.Tensor]:
        """Returns the flat values whose parts are in a vector: the inverse of `pack`."""
        width = self._width(chosen)
        values: dict[int, list[tf.Tensor]] = {number: [] for number in chosen}
        for process in range(self.processes):
            part = vector[process * width : (process + 1) * width]
            for number, piece in self.split(part, chosen, process).items():
                if piece.shape[0]:
                    values[number].append(piece)
        return {number: _joined(pieces, vector) for number, pieces in values.items()}

    def _width(self, chosen: Sequence[int]) -> int:
        """Returns the length of each process's part."""
        return max(self._end(chosen, process) for process in range(self.processes))

    def _end(self, chosen: Sequence[int], process: int) -> int:
        """Returns the length of a process's padded pieces."""
        return sum(_aligned(self.splits[number].size(process)) for number in chosen)


def _joined(pieces: Sequence[tf.Tensor], vector: tf.Tensor) -> tf.Tensor:
    if not pieces:
        return vector[:0]
    if len(pieces) == 1:  # shares the vector's memory
        return pieces[0]
    return tf.concat(pieces, 0)


def _aligned(length: int) -> int:
    """Returns the next multiple of the alignment: TensorFlow copies a slice that begins elsewhere."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _buckets(variables: Variables, processes: int, most_bytes: int) -> Iterator[_Bucket]:
    """Yields the buckets of the variables of each dtype, in the order of the backward pass."""
    for dtype in dict.fromkeys(variable.dtype for variable in variables):
        numbers = [number for number, variable in enumerate(variables) if variable.dtype == dtype]
        shapes = [tuple(variables[number].shape) for number in numbers]
        sizes = [math.prod(shape) * tf.as_dtype(dtype).size for shape in shapes]
        for indices in assign_buckets(sizes, most_bytes):
            splits = split_bucket([shapes[index] for index in indices], processes, _ALIGNMENT)
            yield _Bucket({numbers[i]: split for i, split in zip(indices, splits, strict=True)}, processes)
