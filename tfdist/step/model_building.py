"""The building of a model before its first step, from the specs of the data or by a trace of its step.

Under a strategy stock Keras draws a batch, so that shuffled data have another order than on one device, and calls the model on it.
This builds neither models without `call` (a GAN, a VAE) nor optimizers other than the compiled one. On one device the first run of
the step builds them. Here the step is traced once, which builds the objects that it uses.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Spec, Step, Structure, Variables
from tfdist.compat import (
    keras_internals,
    keras_loops,
    keras_losses,
    keras_metrics,
    optimizer_search,
    tapes,
    tf_internals,
    unsupported,
)
from tfdist.errors import ConfigError
from tfdist.gradients.tape_sums import TapeSums
from tfdist.runtime.report.phase import phase
from tfdist.strategy import Strategy

# For each step, the ids of the objects that its trace leaves unbuilt.
_users: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_unused: weakref.WeakKeyDictionary[keras.Model, dict[str, set[int]]] = weakref.WeakKeyDictionary()


def build(model: keras.Model, step: str, batch: Structure, parts: int | None = None) -> None:
    """Builds a model's unbuilt objects for the step named `step`, which will run first.

    `batch` is a replica's batch; or, with `parts`, the spec of a batch that is split among so many replicas.
    """
    if parts is not None:
        batch = tf.nest.map_structure(functools.partial(_of_replica, parts=parts), batch)
    unused = _unused.setdefault(model, {})
    with phase("building", is_first=True), model.distribute_strategy.scope():
        if keras_internals.is_keras_method(model, step):
            _check_labels(model, batch)
            _by_call(model, batch)
            return
        unbuilt = _unbuilt(model) - unused.get(step, set())
        features = model.distribute_strategy.features if step == "train_step" else ()
        waiting = [feature for feature in features if feature.needs_assigned(model)]
        if not waiting and (not unbuilt or _by_keras_step(model, step, unbuilt)):
            return
        try:
            assigned = trace(getattr(model, step), model, batch)
            for feature in waiting:
                feature.set_assigned(model, assigned)
        except Exception as e:
            # A step that runs eagerly may contain code that cannot be traced. Build the model as Keras does; if that fails, too, the
            # step's own error says more.
            try:
                _by_call(model, batch)
            except Exception:
                unsupported.check_traced(e)
                raise e from e.__cause__
        unused[step] = _unbuilt(model)


def _check_labels(model: keras.Model, batch: Structure) -> None:
    """Raises ConfigError if the compiled loss gets no labels."""
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
    compares = keras_losses.compiled_loss(model) and keras_internals.is_keras_method(model, "compute_loss")
    if compares and tf.nest.map_structure(_present, labels) is None:
        raise ConfigError(unsupported.NO_LABELS)


def _by_call(model: keras.Model, batch: Structure) -> None:
    keras_loops.build_by_call(model, tf.nest.map_structure(_present, batch))


def _by_keras_step(model: keras.Model, step: str, unbuilt: set[int]) -> bool:
    """Builds the compiled optimizer for a step that extends Keras' own, if nothing else is unbuilt. Returns whether that is so.

    This avoids the slow trace of a large model's step: Keras' own step applies that optimizer to all trainable weights.
    """
    loss = keras_losses.compiled_loss(model)
    known = {id(model.optimizer)}
    if loss is not None and not tf.nest.is_nested(model.loss):
        known.add(id(loss))  # the loss has no variables, and the first run of the step builds it
    if unbuilt - known or step in vars(model) or not _calls_keras_step(type(model), step):
        return False
    if id(model.optimizer) in unbuilt and step == "train_step":
        model.optimizer.build(model.trainable_weights)
    return True


def _calls_keras_step(kind: type[keras.Model], step: str) -> bool:
    """Returns whether each override of Keras' method `step` calls the method that it overrides, and none uses the optimizer."""
    for cls in kind.__mro__[: kind.__mro__.index(keras.Model)]:
        if step not in vars(cls):
            continue
        code = getattr(vars(cls)[step], "__code__", None)  # a tf.function has none
        names = code.co_names if code else ()
        if not {"super", step} <= set(names) or "optimizer" in names:
            return False
    return True


def _of_replica(form: Spec, parts: int) -> Structure:
    if _present(form) is None or not form.shape.rank or form.shape[0] is None:
        return form
    spec = form if isinstance(form, tf.TypeSpec) else tf.type_spec_from_value(form)
    size, remainder = divmod(form.shape[0], parts)
    shape = [None if remainder else size, *form.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _unbuilt(model: keras.Model) -> set[int]:
    compiled = (keras_metrics.compiled_metrics(model), keras_losses.compiled_loss(model))
    parts = [*keras_internals.layers(model), *optimizer_search.optimizers(model), *compiled]
    return {id(part) for part in parts if part is not None and not part.built}


def uses_gradients(model: keras.Model) -> bool:
    """Returns whether a trace of the model's training step has shown that it uses its gradients otherwise than to apply them."""
    return model in _users


def trace(step: Step, model: keras.Model, batch: Structure) -> list[keras.Variable]:
    """Traces the step, and drops the graph. Variables that the step makes are created outside of the graph.

    Returns the weights that the step assigns, and for which no optimizer gets a gradient, if a feature needs them.
    """
    strategy = model.distribute_strategy
    with (
        tf_internals.FuncGraph(getattr(step, "__name__", "step")).as_default() as graph,
        tf.variable_creator_scope(functools.partial(_outside_of_graphs, strategy)),
        tf.distribute.ReplicaContext(strategy, 0),
        strategy.as_one_replica(),
        _recording_apply(optimizer_search.optimizers(model)) as applied,
    ):
        watched = TapeSums(False, graph, None, ())
        with tapes.hooked(watched):
            logs = step(tf.nest.map_structure(_placeholder, batch))
        if watched.is_used(logs):
            _users.add(model)
    for optimizer, variables, _ in applied:
        if not optimizer.built:
            optimizer.build(variables)
    if not any(feature.needs_assigned(model) for feature in strategy.features):
        return []
    written = tf_internals.written_handles(graph)
    for _, variables, grads in applied:
        written -= {_handle(variable) for variable, grad in zip(variables, grads, strict=True) if grad is not None}
    return [weight for weight in model.weights if _handle(weight) in written]


def _handle(weight: keras.Variable) -> int:
    """Returns the id of the handle of this process's component of a weight."""
    component = weight.value.distribute_strategy.experimental_local_results(weight.value)[0]
    return id(component.handle)


def _outside_of_graphs(strategy: Strategy, create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    with tf.init_scope(), strategy.as_it_is():
        return create(**kwargs)


def _present(value: Structure) -> Structure:
    """Returns a component of a batch or of its spec; None if it is absent."""
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else None


def _placeholder(value: Structure) -> Structure:
    """Returns the placeholder of a component of the batch; a tensor's batch size becomes unknown, a spec's stays."""
    if _present(value) is None:
        return None
    if isinstance(value, tf_internals.CompositeTensor):
        value = tf.type_spec_from_value(value)
    if isinstance(value, tf.TypeSpec):
        return tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), value, expand_composites=True
        )
    shape = [None, *value.shape[1:]] if len(value.shape) else ()
    return tf.compat.v1.placeholder(value.dtype, shape)


@contextlib.contextmanager
def _recording_apply(
    optimizers: Sequence[keras.optimizers.Optimizer],
) -> Iterator[list[tuple[Any, Variables, Sequence[Gradient]]]]:
    """Makes `apply` of the optimizers only record the variables for which it is called, and their gradients."""
    applied: list[tuple[Any, Variables, Sequence[Gradient]]] = []

    def record(
        optimizer: keras.optimizers.Optimizer, grads: Sequence[Gradient], trainable_variables: Variables | None = None
    ) -> None:
        if trainable_variables is None and optimizer.built:
            trainable_variables = keras_internals.trainable_variables(getattr(optimizer, "inner_optimizer", optimizer))
        if trainable_variables:
            applied.append((optimizer, list(trainable_variables), list(grads)))

    before = [vars(optimizer).get("apply") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.apply = functools.partial(record, optimizer)
    try:
        yield applied
    finally:
        for optimizer, apply in zip(optimizers, before, strict=True):
            del optimizer.apply
            if apply is not None:
                optimizer.apply = apply
