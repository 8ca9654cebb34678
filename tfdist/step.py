"""The function that Keras' `fit` and `evaluate` call for each execution of one or several steps.

Keras makes it in `Model._make_function`, which the Trainer overrides on its models. Stock Keras 3, with several replicas,
cannot run several steps in one execution, compiles the collectives along with the replica's computation, and reduces
each number of the logs by itself.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import batch_losses, optimizer_search, refusals
from tfdist import optimizer as optimizer_lib
from tfdist.compression.base import Compressor
from tfdist.errors import ConfigError
from tfdist.update import sum_rows_first

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_MAKE_FUNCTION = "_make_function"

_NOTES = "float32"  # the type of numbers with which notes travel
_STARVED = (
    "A training batch does not give each replica an example, and BatchNormalization makes NaN of none; choose another batch "
    "size, or leave the rest out (drop_remainder=True)."
)


def adopt(model: keras.Model, compression: Compressor | None = None) -> None:
    """Makes Keras build `model`'s training and test functions here, and its optimizer reduce first. In place."""
    if KERAS_MAKE_FUNCTION not in vars(model):
        model.train_function = model.test_function = None
    setattr(model, KERAS_MAKE_FUNCTION, functools.partial(Execution, model, compression))
    for optimizer in optimizer_search.optimizers(model):
        if model.distribute_strategy.num_replicas_in_sync > 1:
            optimizer_lib.distribute_optimizer(optimizer, compression, clip_after_reduce=True)
        else:
            sum_rows_first(optimizer)


class Execution:
    """Runs `steps_per_execution` steps for each call.

    Args:
        model: The model.
        compression: What sums its gradients, or None.
        step: Its `train_step` or `test_step`.

    Attributes:
        left: How many steps there are left to run, where that is known; the next call runs no more. Keras itself runs on
            to the next multiple of `steps_per_execution`.
    """

    def __init__(self, model: keras.Model, compression: Compressor | None, step: Callable[[Any], Any]):
        refusals.check_model(model)  # it may have been compiled anew, and fitted without the Trainer
        adopt(model, compression)
        self.left: int | None = None
        self.heard: tf.Tensor | None = None
        self._strategy = model.distribute_strategy
        self._steps = int(model.steps_per_execution)
        self._replica = _ReplicaStep(model, step)
        self._one, self._some = self._run_one, self._run_some
        self._single = self._run_single
        if not model.run_eagerly:
            self._one = tf.function(self._run_one, reduce_retracing=True, autograph=False)
            self._single = tf.function(self._run_single, reduce_retracing=True, autograph=False)
            self._some = tf.function(self._run_some, reduce_retracing=True, autograph=False)

    def __call__(self, iterator: Any) -> Mapping[str, Any]:
        """Returns the logs of the last step, averaged over the replicas.

        Raises:
            ConfigError: XLA cannot compile the model, or a replica has no example for its BatchNormalization.
        """
        try:
            return self._execute(iterator)
        except tf.errors.InvalidArgumentError as e:
            if _STARVED in e.message:
                raise ConfigError(_STARVED) from e
            if "unsupported operations" not in e.message:
                raise
            operation = re.search(r"on XLA\w*: (.*?)[ {(]", e.message)
            raise ConfigError(
                f"jit_compile=True: XLA cannot compile {operation[1] if operation else 'an operation'} of this model; "
                "compile the model with jit_compile=False."
            ) from e

    def _execute(self, iterator: Any) -> Mapping[str, Any]:
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            for _, data in zip(range(self._steps), iterator, strict=False):  # of train_on_batch
                logs, self.heard = self._reduced(self._one(data))
        elif self._steps == 1:
            logs, self.heard = self._single(iterator)
        else:
            steps, self.left = self._steps if self.left is None else min(self._steps, self.left), None
            logs, self.heard = self._some(iterator, tf.constant(steps))
        return logs

    def _run_one(self, data: Any) -> dict[str, tf.Tensor]:
        """One step; returns the packed logs, averaged over this process's replicas."""
        with self._strategy.applying_known_optimizers():
            packed = self._strategy.run(self._replica, args=(data,))
        local = self._strategy.experimental_local_results
        return {dtype: tf.add_n(local(values)) / len(local(values)) for dtype, values in packed.items()}

    def _run_single(self, iterator: Any) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        return self._reduced(self._run_one(iterator.get_next()))

    def _run_some(self, iterator: Any, steps: tf.Tensor) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        def body(done: tf.Tensor, _: Any, logs: Any) -> Any:
            data = iterator.get_next_as_optional()
            more = data.has_value()
            return done + 1, more, tf.cond(more, lambda: self._run_one(data.get_value()), lambda: logs)

        first = self._run_one(iterator.get_next())
        *_, logs = tf.while_loop(
            lambda done, more, _: tf.logical_and(more, done < steps), body, (1, True, first), parallel_iterations=1
        )
        return self._reduced(logs)

    def _reduced(self, packed: dict[str, tf.Tensor]) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        """Returns the logs, averaged over the workers, and what they have noted."""
        heard = None
        if isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            if (notes := self._strategy.notes) is not None:
                packed = {**packed, _NOTES: tf.concat([packed.get(_NOTES, []), notes], 0)}
            each = self._strategy.run(lambda: packed)
            packed = {dtype: self._strategy.reduce("MEAN", value, axis=None) for dtype, value in each.items()}
            heard = None if notes is None else packed[_NOTES][-notes.shape[0] :]
        return self._replica.unpack(packed), heard


class _ReplicaStep:
    """A step on one replica."""

    def __init__(self, model: keras.Model, step: Callable[[Any], Any]):
        self._model = model
        self._step = step
        self._trains = step == model.train_step
        reductions = {loss.reduction for loss in tf.nest.flatten(model.loss) if isinstance(loss, keras.losses.Loss)}
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._sums = "sum" in reductions  # Keras divides what is beside it
        # Keras' own step scales one loss and applies its gradients once.
        self._by_loss = type(model).train_step is keras.Model.train_step
        self._compiles = model.jit_compile and not model.run_eagerly
        self._compiled: dict[int, Callable[[Any, Any], Any]] = {}  # one for each replica
        self._variables: Any = None
        self._logs: Any = None

    def __call__(self, data: Any) -> dict[str, tf.Tensor]:
        # What needs no data (counting the step, drawing a dropout mask) must not run where there turn out to be none.
        present = [tensor for tensor in tf.nest.flatten(data, expand_composites=True) if isinstance(tensor, tf.Tensor)]
        with tf.control_dependencies(present):
            return self._run(data)

    def _run(self, data: Any) -> dict[str, tf.Tensor]:
        data = tf.nest.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)
        context = tf.distribute.get_replica_context()
        strategy = context.strategy
        several = self._replicas > 1
        part = functools.partial(self._share, data, context) if several and not self._sums else _nothing
        share = None
        if several and self._trains:
            counts = self._counts(data, context)
            share, data = (None if self._sums else self._part(counts)), self._fed(data, counts)
        elif self._compiles:
            share = part()
        strategy.draw_own_numbers()  # a collective may have waited for the other replicas
        with contextlib.nullcontext() if self._sums else strategy.as_one_replica():
            if not self._compiles:
                known = (lambda: share) if self._trains else part  # of which a test step seldom has need
                with self._sharing(share), batch_losses.of_share(self._model, _counted(data), known):
                    return self._pack(self._step(data))
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            if replica not in self._compiled:
                self._compiled[replica] = tf.function(
                    self._local, reduce_retracing=True, jit_compile=True, autograph=False
                )
            logs, applied = self._compiled[replica](data, share)
        for grads, variables in zip(applied, self._variables, strict=True):
            self._model.optimizer.apply(grads, variables)
        return self._pack(logs)

    def _local(self, data: Any, share: Any) -> Any:
        """What is compiled: the step up to its gradients, as no collective can be."""
        whole = batch_losses.of_share(self._model, _counted(data), lambda: share)
        with self._sharing(share), whole, optimizer_lib.capturing() as captured:
            logs = self._step(data)
        self._variables = [variables for _, variables in captured]
        return logs, [grads for grads, _ in captured]

    def _sharing(self, share: Any) -> contextlib.AbstractContextManager[None]:
        return optimizer_lib.sharing(share, self._model.optimizer, self._by_loss)

    def _share(self, data: Any, context: tf.distribute.ReplicaContext) -> Any:
        return self._part(self._counts(data, context))

    def _counts(self, data: Any, context: tf.distribute.ReplicaContext) -> tf.Tensor | None:
        """Returns `[this replica's examples, all examples, replicas without any]`, or None where all have the same number."""
        mine = _examples(data)
        if mine is None or isinstance(mine, int):
            return None
        mine = tf.cast(mine, tf.float64)  # for losses of any precision
        # No replica can know by itself that another one has nothing.
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack([mine, tf.cast(mine == 0, tf.float64)]))
        return tf.concat([[mine], sums], 0)

    def _part(self, counts: tf.Tensor | None) -> Any:
        """Returns this replica's part in the mean over the batch."""
        return 1 / self._replicas if counts is None else counts[0] / counts[1]

    def _fed(self, data: Any, counts: tf.Tensor | None) -> Any:
        """Returns the data, once it is seen that no replica's BatchNormalization makes NaN of none."""
        layers = self._model._flatten_layers()
        if counts is None or not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
            return data
        fed = tf.debugging.Assert(tf.equal(counts[2], 0), [_STARVED], summarize=1)
        with tf.control_dependencies([fed] if fed is not None else []):
            return tf.nest.map_structure(tf.identity, data, expand_composites=True)

    def _pack(self, logs: Any) -> dict[str, tf.Tensor]:
        """Concatenates the numbers of the logs, so that one collective reduces them all."""
        self._logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        for value in tf.nest.flatten(self._logs):
            if value.shape.num_elements() is None or not (value.dtype.is_numpy_compatible and value.dtype != tf.string):
                raise ConfigError(
                    f"A {self._step.__name__} must return numbers of known shape, to be averaged over the replicas. "
                    f"{type(self._model).__name__} returns {value.dtype.name} of shape {value.shape}."
                )
        packed: dict[str, list[tf.Tensor]] = {}
        for value in tf.nest.flatten(self._logs):
            dtype = _packed_dtype(value)
            packed.setdefault(dtype.name, []).append(tf.reshape(tf.cast(value, dtype), [-1]))
        return {dtype: tf.concat(values, 0) for dtype, values in packed.items()}

    def unpack(self, packed: dict[str, tf.Tensor]) -> Any:
        """Returns the logs from what `_pack` made of them."""
        offsets = dict.fromkeys(packed, 0)

        def take(value: tf.Tensor) -> tf.Tensor:
            name = _packed_dtype(value).name
            size = value.shape.num_elements()
            taken = packed[name][offsets[name] : offsets[name] + size]
            offsets[name] += size
            return tf.reshape(taken, value.shape)

        return tf.nest.map_structure(take, self._logs)


def _packed_dtype(value: tf.Tensor) -> tf.DType:
    return tf.float32 if value.dtype in (tf.float32, tf.float16, tf.bfloat16, tf.bool) else tf.float64


def _examples(data: Any) -> tf.Tensor | int | None:
    first = next((v for v in tf.nest.flatten(data) if v is not None), None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if first is None or not first.shape.rank:
        return None
    known = first.shape[0] is not None and not tf.executing_eagerly()  # which knows each replica's own alone
    return int(first.shape[0]) if known else tf.shape(first)[0]


def _nothing() -> None:
    return None


def _counted(data: Any) -> tf.Tensor | None:
    examples = _examples(data)
    return None if examples is None else tf.convert_to_tensor(examples)


class StepLimit(keras.callbacks.Callback):
    """Tells `Execution` how many steps are left.

    Args:
        train_steps: The steps of an epoch, or None if unknown.
        test_steps: The steps of an evaluation, or None if unknown.
    """

    def __init__(self, train_steps: int | None, test_steps: int | None):
        super().__init__()
        self._train_steps = train_steps
        self._test_steps = test_steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        steps = self._train_steps
        if steps is None and not isinstance(self.model.train_function, Execution):
            steps = (self.params or {}).get("steps")  # so that the logs of an epoch's last step are complete
        self._tell(self.model.train_function, steps, batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._tell(self.model.test_function, self._test_steps, batch)

    def _tell(self, function: Any, steps: int | None, begun: int) -> None:
        if hasattr(function, "left"):  # it is not of the user's own making
            function.left = steps and steps - begun
