"""The function that Keras' `fit` and `evaluate` call for each execution of one or several steps.

Keras makes it in `Model._make_function`, which the Trainer overrides on its models. Stock Keras 3, with several replicas,
cannot run several steps in one execution, compiles the collectives along with the replica's computation, and reduces
each number of the logs by itself.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import batch_losses, dealing, first_batch, optimizer_search, refusals, starved, synchronized_norm
from tfdist import optimizer as optimizer_lib
from tfdist.compression.base import Compressor
from tfdist.computed_logs import ComputedLogs
from tfdist.errors import ConfigError
from tfdist.update import sum_rows_first

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_LOGS = "_get_metrics_result_or_logs"
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
    if KERAS_LOGS not in vars(model):
        setattr(model, KERAS_LOGS, functools.partial(_results_or_logs, model))
    synchronized_norm.share_moments(model)
    first_batch.adopt(model)
    for optimizer in optimizer_search.optimizers(model):
        if model.distribute_strategy.num_replicas_in_sync > 1:
            optimizer_lib.distribute_optimizer(optimizer, compression, clip_after_reduce=True)
        else:
            sum_rows_first(optimizer)


def _results_or_logs(model: keras.Model, logs: Any) -> Any:
    """As Keras' own, which returns the logs of the last step where they are others than the metrics' results."""
    found: Any = getattr(type(model), KERAS_LOGS)(model, logs)
    for function in (model.train_function, model.test_function):
        if isinstance(function, Execution) and found is not None and found is function.logs:
            return {**logs, **function.computed_logs()}
    return found


class Execution:
    """Runs `steps_per_execution` steps for each call.

    Args:
        model: The model.
        compression: What sums its gradients, or None.
        step: Its `train_step` or `test_step`.

    Attributes:
        left: How many steps there are left to run, where that is known; the next call runs no more. Keras itself runs on
            to the next multiple of `steps_per_execution`.
        heard: What the workers have noted.
        logs: What the last call has returned.
    """

    def __init__(self, model: keras.Model, compression: Compressor | None, step: Callable[[Any], Any]):
        refusals.check_model(model)  # it may have been compiled anew, and fitted without the Trainer
        adopt(model, compression)
        self.left: int | None = None
        self.heard: tf.Tensor | None = None
        self.logs: Mapping[str, Any] | None = None
        self._strategy = model.distribute_strategy
        self._steps = int(model.steps_per_execution)
        self._replica = _ReplicaStep(model, step)
        self._end = iter(tf.data.Dataset.range(0))  # raises OutOfRangeError, also within a tf.function
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
            self.logs = self._execute(iterator)
            return self.logs
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

    def computed_logs(self) -> dict[str, Any]:
        """Returns what the step's logs are that it computes from metrics, with the metrics of all replicas. A collective."""
        return self._replica.computed.now() if self._replica.computed else {}

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

    def _run_one(self, data: Any, totals: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        """One step; returns the packed logs, averaged over this process's replicas."""
        if isinstance(data, dealing.Dealt) and totals is None:
            totals = dealing.totals(data, self._strategy)
        with self._strategy.applying_known_optimizers():
            packed, moves = self._strategy.run(self._replica, args=(data, totals))
        if totals is not None:
            starved.move_statistics(self._replica.model, data, totals, moves)
        local = self._strategy.experimental_local_results
        return {dtype: tf.add_n(local(values)) / len(local(values)) for dtype, values in packed.items()}

    def _run_next(self, iterator: Any) -> dict[str, tf.Tensor]:
        """As `_run_one`; raises OutOfRangeError at the end of the data."""
        data = iterator.get_next()
        if not isinstance(data, dealing.Dealt):
            return self._run_one(data)
        totals = dealing.totals(data, self._strategy)
        with tf.control_dependencies([tf.cond(totals[0] > 0, lambda: tf.constant(0, tf.int64), self._end.get_next)]):
            return self._run_one(data, tf.identity(totals))

    def _run_single(self, iterator: Any) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        return self._reduced(self._run_next(iterator))

    def _run_some(self, iterator: Any, steps: tf.Tensor) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        def body(done: tf.Tensor, _: Any, logs: Any) -> Any:
            data = iterator.get_next_as_optional()
            more, logs = tf.cond(data.has_value(), lambda: run(data.get_value(), logs), lambda: (False, logs))
            return done + 1, more, logs

        def run(data: Any, logs: Any) -> Any:
            if not isinstance(data, dealing.Dealt):
                return True, self._run_one(data)
            totals = dealing.totals(data, self._strategy)
            return totals[0] > 0, tf.cond(totals[0] > 0, lambda: self._run_one(data, totals), lambda: logs)

        *_, logs = tf.while_loop(
            lambda done, more, _: tf.logical_and(more, done < steps),
            body,
            (1, True, self._run_next(iterator)),
            parallel_iterations=1,
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
        self.model = model
        self._step = step
        self.trains = step == model.train_step
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        # Keras' own step scales one loss and applies its gradients once.
        self._by_loss = type(model).train_step is keras.Model.train_step
        self._is_keras = step.__func__ in (keras.Model.train_step, keras.Model.test_step)  # type: ignore[attr-defined]
        self.computed: ComputedLogs | None = None
        self._compiles = model.jit_compile and not model.run_eagerly
        self._compiled: dict[int, Callable[..., Any]] = {}  # one for each replica
        self._variables: Any = None
        self._logs: Any = None

    def __call__(self, data: Any, totals: tf.Tensor | None) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        """Runs the step.

        Args:
            data: This replica's batch, or what it was dealt.
            totals: Of what was dealt, as of `dealing.totals`.

        Returns:
            The packed logs; what `starved.watch` says of the step.
        """
        # What needs no data (counting the step, drawing a dropout mask) must not run where there turn out to be none.
        given = tf.nest.flatten((data, totals), expand_composites=True)
        with tf.control_dependencies([tensor for tensor in given if isinstance(tensor, tf.Tensor)]):
            data = tf.nest.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)
            return self._run_dealt(data, totals) if isinstance(data, dealing.Dealt) else (self._run_whole(data), [])

    def _run_dealt(self, dealt: Any, totals: Any) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        data, counts = dealt
        mine = counts[0, 0]
        examples, everything = tf.cast(mine, tf.float64), tf.cast(totals[0], tf.float64)
        if self.trains and isinstance(
            self.model.distribute_strategy, tf.distribute.experimental.CentralStorageStrategy
        ):
            data = self._fed(data, self._replicas - totals[1])  # its statistics are one for all replicas
        after = starved.watch(self.model, mine, totals)
        packed = self._run(data, tf.cast(mine, tf.int32), lambda: examples / everything)
        moves = after()
        # Numbers of the logs are averaged over the replicas, each of which counts as its examples do.
        weight = examples * self._replicas / everything
        packed = {name: tf.math.multiply_no_nan(each, tf.cast(weight, each.dtype)) for name, each in packed.items()}
        return packed, moves

    def _run_whole(self, data: Any) -> dict[str, tf.Tensor]:
        examples, context = dealing.examples(data), tf.distribute.get_replica_context()
        if examples is None or isinstance(examples, int):
            count = None if examples is None else tf.constant(examples)
            return self._run(data, count, lambda: 1 / self._replicas)
        # For losses of any precision. No replica can know by itself that another one has nothing.
        mine = tf.stack([tf.cast(examples, tf.float64), tf.cast(tf.equal(examples, 0), tf.float64)])
        if not self.trains or self._replicas == 1:  # a test step seldom has need of its share
            return self._run(data, examples, lambda: mine[0] / context.all_reduce(tf.distribute.ReduceOp.SUM, mine)[0])
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
        return self._run(self._fed(data, sums[1]), examples, lambda: mine[0] / sums[0])

    def _run(self, data: Any, examples: tf.Tensor | None, part: Callable[[], Any]) -> dict[str, tf.Tensor]:
        """Runs the step.

        Args:
            data: A batch.
            examples: How many of it count, a scalar.
            part: Returns this replica's part in the mean over the batch of all.
        """
        context = tf.distribute.get_replica_context()
        strategy = context.strategy
        if self._replicas == 1:
            part = _nothing
        share = part() if self.trains or self._compiles else None
        strategy.draw_own_numbers()  # a collective may have waited for the other replicas
        with strategy.as_one_replica():
            if not self._compiles:
                known = (lambda: share) if self.trains else part
                with self._within(data, share, examples, known):
                    return self._pack(self._step(data))
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            if replica not in self._compiled:
                self._compiled[replica] = tf.function(
                    self._local, reduce_retracing=True, jit_compile=True, autograph=False
                )
            logs, applied = self._compiled[replica](data, examples, share)
        for grads, variables in zip(applied, self._variables, strict=True):
            self.model.optimizer.apply(grads, variables)
        return self._pack(logs)

    def _local(self, data: Any, examples: tf.Tensor | None, share: Any) -> Any:
        """What is compiled: the step up to its gradients, as no collective can be."""
        with self._within(data, share, examples, lambda: share), optimizer_lib.capturing() as captured:
            logs = self._step(data)
        self._variables = [variables for _, variables in captured]
        return logs, [grads for grads, _ in captured]

    @contextlib.contextmanager
    def _within(self, data: Any, share: Any, examples: tf.Tensor | None, part: Callable[[], Any]) -> Iterator[None]:
        inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
        with (
            optimizer_lib.sharing(share, self.model.optimizer, self._by_loss),
            batch_losses.of_share(self.model, examples, part, inputs, self.trains, self._compiles),
            dealing.of_replica(examples),
        ):
            yield

    def _fed(self, data: Any, starved_replicas: tf.Tensor) -> Any:
        """Returns the data, once it is seen that no replica's BatchNormalization makes NaN of none."""
        if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in self.model._flatten_layers()):
            return data
        fed = tf.debugging.Assert(tf.equal(starved_replicas, 0), [_STARVED], summarize=1)
        with tf.control_dependencies([fed] if fed is not None else []):
            return tf.nest.map_structure(tf.identity, data, expand_composites=True)

    def _pack(self, logs: Any) -> dict[str, tf.Tensor]:
        """Concatenates the numbers of the logs, so that one collective reduces them all."""
        self._logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        if self._replicas > 1 and not self._is_keras and tf.inside_function():
            self.computed = ComputedLogs(self.model, self._logs)
        for value in tf.nest.flatten(self._logs):
            if value.shape.num_elements() is None or not (value.dtype.is_numpy_compatible and value.dtype != tf.string):
                raise ConfigError(
                    f"A {self._step.__name__} must return numbers of known shape, to be averaged over the replicas. "
                    f"{type(self.model).__name__} returns {value.dtype.name} of shape {value.shape}."
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


def _nothing() -> None:
    return None


class StepLimit(keras.callbacks.Callback):
    """Tells `Execution` how many steps are left, and refuses data that hold no batch, for which Keras returns nothing.

    Args:
        train_steps: The steps of an epoch, or None if unknown.
        test_steps: The steps of an evaluation, or None if unknown.

    Raises:
        ConfigError: From its hooks, for data that hold no batch.
    """

    def __init__(self, train_steps: int | None = None, test_steps: int | None = None):
        super().__init__()
        self._train_steps = train_steps
        self._test_steps = test_steps
        self._trained = self._tested = self._predicted = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        steps = self._train_steps
        if steps is None and not isinstance(self.model.train_function, Execution):
            steps = (self.params or {}).get("steps")  # so that the logs of an epoch's last step are complete
        self._tell(self.model.train_function, steps, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._trained = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # A training that goes on after an epoch's last step has that epoch's logs.
        if not self._trained and all(name.startswith("val_") for name in logs or ()):
            raise ConfigError("The training data hold no batch.")

    def on_test_begin(self, logs: Any = None) -> None:
        self._tested = False

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._tell(self.model.test_function, self._test_steps, batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._tested = True

    def on_test_end(self, logs: Any = None) -> None:
        if not self._tested:
            raise ConfigError("The data to evaluate, or for validation, hold no batch.")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._predicted = True

    def on_predict_end(self, logs: Any = None) -> None:
        if not self._predicted:
            raise ConfigError("The data to predict hold no batch.")

    def _tell(self, function: Any, steps: int | None, begun: int) -> None:
        if hasattr(function, "left"):  # it is not of the user's own making
            function.left = steps and steps - begun
