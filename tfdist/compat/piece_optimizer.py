"""An optimizer of Keras that updates pieces of variables: a copy of the user's optimizer, outside of any strategy.

A release may move the private names of Keras and TensorFlow here: tests/multiprocess/test_sharded.py then fails.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.utils.naming import auto_name
from tensorflow.python.distribute import distribute_lib

from tfdist.compat.keras_internals import GRADIENT_ACCUMULATOR, OPTIMIZER_SCALARS, trainable_variables
from tfdist.compat.split_value import SplitSlot
from tfdist.config import relations
from tfdist.sharding.split import Split

_APPLIED_ELSEWHERE: dict[str, Any] = {
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
_SPLIT_SLOTS = "_split_slots"  # the attribute of an optimizer whose slots are split
_MASTERS = "_masters"  # the attribute with the masters of its pieces
_AVERAGES = "_model_variables_moving_average"
_TAKE_OVER = "_take_over"  # the attribute of a copy with the function that reads the user's optimizer
# Arguments that decide which slots an optimizer creates: the attributes with these slots, and a value with which it creates them.
_SWITCHES: dict[str, tuple[tuple[str, ...], Any]] = {
    "momentum": (("momentums", "_momentums"), 0.5),
    "amsgrad": (("_velocity_hats",), True),
    "centered": (("_average_gradients",), True),
    "use_ema": ((_AVERAGES,), True),
}
_ids = itertools.count()


class Piece:
    """Some elements of a model's variable, which Keras updates as if they were a variable.

    Without a master the elements have no memory of their own: they are read from the variable before an update, and written to it
    afterwards.

    Attributes:
        variable: The model's variable.
        split: The elements that each process holds: ranges of the flat value.
        process: The number of this process.
        index: The index of this process's elements.
        elements: The number of elements.
        value: Their current values during an update.
        master: The variable with their values of float32 between two updates, if the model's variable has rounded ones; else None.
    """

    def __init__(self, variable: keras.Variable, split: Split, process: int):
        self.variable = variable
        self.split = split
        self.process = process
        self.index = split.indices[process]
        self.elements = split.size(process)
        self.value: tf.Tensor = None
        self.master: keras.Variable | None = None
        # What Keras reads of a variable.
        self.path = variable.path
        self.name = variable.name
        self.shape = (self.elements,)
        self.dtype = tf.as_dtype(variable.dtype)
        self.device = variable.value.device
        self._unique_id = f"piece_{next(_ids)}"

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the values."""
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the values."""
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the values."""
        self.assign(self.value - tf.cast(value, self.dtype))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self.value

    def __sub__(self, other: tf.Tensor) -> tf.Tensor:
        return self.value - other

    def __mul__(self, other: tf.Tensor) -> tf.Tensor:
        return self.value * other


class _NoAverages:
    """Stands where Keras keeps whole moving averages. `keras.callbacks.SwapEMAWeights` reads them there."""

    def __iter__(self) -> Iterator[Any]:
        relations.check(("SwapEMAWeights", "shard_optimizer"))
        return iter(())  # for the type checker


def build_copy(
    optimizer: keras.optimizers.Optimizer, pieces: Sequence[Piece], has_masters: bool, switches: Mapping[str, Any]
) -> keras.optimizers.Optimizer:
    """Returns a copy of an optimizer with the same arguments, except for those that the caller applies itself, built on pieces.

    Before each update it takes over the arguments that the user has set since. `switches` are arguments with which the slots are created.
    `all_variables` of the optimizer then contains the slots of the copy, and `state_variables` also the masters of pieces of float32, if it `has_masters`.
    """
    pieces_of_slots: dict[int, Piece] = {}
    config = {**optimizer.get_config(), **_APPLIED_ELSEWHERE, "learning_rate": 0.0, **switches}
    taken = [name for name in config if name not in (*_APPLIED_ELSEWHERE, "learning_rate")]

    def build() -> keras.optimizers.Optimizer:
        copy = type(optimizer).from_config(config)
        create = copy.add_variable_from_reference

        def add(reference_variable: Piece, name: str | None = None, initializer: Any = "zeros") -> keras.Variable:
            slot = create(reference_variable, name, initializer)
            pieces_of_slots[id(slot)] = reference_variable
            return slot

        copy.add_variable_from_reference = add
        copy.build(list(pieces))
        for piece in pieces:
            if has_masters and piece.dtype == tf.float32:
                piece.master = keras.Variable(tf.zeros(piece.shape), trainable=False, name="master")
        return copy

    # A new thread is outside of all scopes of TensorFlow and Keras, so that the variables belong to no strategy and no graph.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        copy = pool.submit(build).result()

    def update(strategy: Any, pairs: Sequence[tuple[tf.Tensor, Piece]], learning_rate: tf.Tensor) -> None:
        for grad, piece in pairs:
            copy.update_step(grad, piece, learning_rate)

    copy._distributed_tf_update_step = update
    vars(copy)[_TAKE_OVER] = lambda: vars(copy).update({name: getattr(optimizer, name) for name in taken})
    copy._use_weight_decay = lambda piece: optimizer._use_weight_decay(piece.variable.value)
    # Not an attribute that Keras and TensorFlow track: the copy's variables have the shapes of pieces.
    vars(optimizer)[_SPLIT_SLOTS] = [_split_slot(slot, pieces_of_slots.get(id(slot))) for slot in slots(copy)]
    with_masters = [piece for piece in pieces if piece.master is not None]
    vars(optimizer)[_MASTERS] = [_slot_of(piece, f"{piece.path}_master", piece.master) for piece in with_masters]
    if config["use_ema"]:
        vars(optimizer)[_AVERAGES] = _NoAverages()
    return copy


def switches_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the arguments with which an optimizer creates the slots that it has, which the user may have changed since."""
    held = vars(optimizer)
    switches = {}
    for name, (attributes, value) in _SWITCHES.items():
        if name in held:
            has_slots = any(held.get(attribute) for attribute in attributes)
            switches[name] = (held[name] or value) if has_slots else type(value)()
    return switches


def _split_slot(slot: keras.Variable, piece: Piece | None) -> keras.Variable | SplitSlot:
    """Returns what stands for the whole slot; a variable that belongs to no piece, such as Nadam's product, is whole."""
    if piece is None:
        # Its name has a number of the thread that built the copy; in a backup it has the number that the whole slot would have.
        slot._path = auto_name(type(slot).__name__)
        return slot
    return _slot_of(piece, slot.path, slot)


def _slot_of(piece: Piece, path: str, held: keras.Variable) -> SplitSlot:
    """Returns what stands for a value of the shape of a piece's variable, of which this process holds the piece."""
    return SplitSlot(path, piece.split, piece.process, held.value)


def all_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | SplitSlot]:
    """Returns an optimizer's variables in Keras' order, and slots that are split."""
    variables = list(optimizer.variables)
    split = slots_of_copy(optimizer)
    if not split:
        return variables
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    averages = 0
    if _AVERAGES in vars(leaf):  # `use_ema` may have changed
        averages = len(trainable_variables(leaf))
    # Keras creates moving averages before gradient accumulators, and other slots after them.
    accumulators = [v for v in variables if v.name.endswith(GRADIENT_ACCUMULATOR)]
    others = variables[: len(variables) - len(accumulators)]
    return [*others, *split[:averages], *accumulators, *split[averages:]]


def state_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | SplitSlot]:
    """Returns the state of an optimizer: `all_variables`, and the float32 values of weights that the model has rounded."""
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    return [*all_variables(optimizer), *vars(leaf).get(_MASTERS, ())]


def slots_of_copy(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable | SplitSlot]:
    """Returns the slots that are in an optimizer's copy, in Keras' order; empty unless they are split."""
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    return list(vars(leaf).get(_SPLIT_SLOTS, ()))


def update_pieces(
    copy: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor],
    pieces: Sequence[Piece],
    iterations: tf.Tensor,
    learning_rate: tf.Tensor,
) -> None:
    """Decays and updates pieces as Keras does, in cross-replica context. `iterations` is the number of updates so far."""
    with _updating(copy, _iterations=iterations, _learning_rate=learning_rate):
        BaseOptimizer._apply_weight_decay(copy, pieces)
        copy._backend_update_step(grads, pieces, learning_rate)


def move_averages(copy: keras.optimizers.Optimizer, pieces: Sequence[Piece], iterations: tf.Tensor) -> None:
    """Updates the moving averages of all pieces as Keras does, in cross-replica context. `iterations` is the number of updates so far."""
    with _updating(copy, _iterations=iterations):
        copy._update_model_variables_moving_average(pieces)


def averages(copy: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Returns the moving averages of all pieces."""
    return [average.value for average in getattr(copy, _AVERAGES)]


def slots(copy: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of a copy except for the number of updates and the learning rate, which the user's optimizer has."""
    return [v for v in copy.variables if v.name not in OPTIMIZER_SCALARS]


@contextlib.contextmanager
def _updating(copy: keras.optimizers.Optimizer, **scalars: tf.Tensor) -> Iterator[None]:
    """Lets Keras update the copy's variables, which belong to no strategy, with the arguments and scalars of the user's optimizer."""
    vars(copy)[_TAKE_OVER]()
    # Tensors in place of variables: a backup would have to know variables that a step changes.
    vars(copy).update(scalars)
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        vars(copy).update(dict.fromkeys(scalars))
