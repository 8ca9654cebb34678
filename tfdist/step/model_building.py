"""Builds a model before its first step: by the form of the data, or by its own step. (Keras calls it on a batch.)

Stock Keras draws a batch under a strategy, so that shuffled data come in another order than on one device; and it calls the
model, which builds neither one without a `call` (a GAN, a VAE) nor any but the compiled optimizer. On one device it leaves both to
the first run of the step. Here the step is traced once, which builds the objects that it uses.
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
    tf_internals,
    unsupported,
)
from tfdist.strategy import Strategy

_left: weakref.WeakKeyDictionary[keras.Model, dict[str, set[int]]] = (
    weakref.WeakKeyDictionary()
)  # what a step does not use


def build(model: keras.Model, step: str, batch: Structure, parts: int | None = None) -> None:
    """Builds the unbuilt parts of a model, for the step named `step`, which will run first.

    `batch` is a replica's; or the form of a batch that is split among `parts` replicas.
    """
    if parts is not None:
        batch = tf.nest.map_structure(functools.partial(_of_replica, parts=parts), batch)
    left = _left.setdefault(model, {})
    with model.distribute_strategy.scope():
        if getattr(type(model), step) is getattr(keras.Model, step):
            _by_call(model, batch)
        elif (unbuilt := _unbuilt(model) - left.get(step, set())) and not _by_keras_step(model, step, unbuilt):
            try:
                trace(getattr(model, step), model, batch)
            except Exception as e:
                try:
                    _by_call(model, batch)
                except Exception:
                    unsupported.check_traced(e)
                    raise e from e.__cause__
            left[step] = _unbuilt(model)


def _by_call(model: keras.Model, batch: Structure) -> None:
    keras_loops.build_by_call(model, tf.nest.map_structure(_present, batch))


def _by_keras_step(model: keras.Model, step: str, unbuilt: set[int]) -> bool:
    """Builds the compiled optimizer for a step that extends Keras' own, if no more is missing. Returns whether that is so.

    To trace the step of a large model takes long, and Keras' own applies that optimizer to all trainable weights.
    """
    loss = keras_losses.compiled_loss(model)
    known = {id(model.optimizer)}
    if loss is not None and not tf.nest.is_nested(model.loss):
        known.add(id(loss))  # which has no variables, and is built by the step's first run
    if unbuilt - known or not _calls_keras_step(type(model), step):
        return False
    if id(model.optimizer) in unbuilt and step == "train_step":
        model.optimizer.build(model.trainable_weights)
    return True


def _calls_keras_step(kind: type[keras.Model], step: str) -> bool:
    """Returns whether each of a class's own methods of that name calls the one that it overrides, and none names the optimizer."""
    for each in kind.__mro__[: kind.__mro__.index(keras.Model)]:
        if (method := vars(each).get(step)) is None:
            continue
        code = getattr(method, "__code__", None)  # none of a tf.function
        names = code.co_names if code else ()
        if not {"super", step} <= set(names) or "optimizer" in names:
            return False
    return True


def _of_replica(form: Spec, parts: int) -> Structure:
    if _present(form) is None or not form.shape.rank or form.shape[0] is None:
        return form
    spec = form if isinstance(form, tf.TypeSpec) else tf.type_spec_from_value(form)
    size, rest = divmod(form.shape[0], parts)
    shape = [None if rest else size, *form.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _unbuilt(model: keras.Model) -> set[int]:
    compiled = (keras_metrics.compiled_metrics(model), keras_losses.compiled_loss(model))
    parts = [*keras_internals.layers(model), *optimizer_search.optimizers(model), *compiled]
    return {id(part) for part in parts if part is not None and not part.built}


def trace(step: Step, model: keras.Model, batch: Structure) -> None:
    """Traces the step, and drops the graph. Variables that it makes are made outside."""
    strategy = model.distribute_strategy
    with (
        tf_internals.FuncGraph(step.__name__).as_default(),
        tf.variable_creator_scope(functools.partial(_outside_of_graphs, strategy)),
        tf.distribute.ReplicaContext(strategy, 0),
        strategy.as_one_replica(),
        _noting(optimizer_search.optimizers(model)) as applied,
    ):
        step(tf.nest.map_structure(_placeholder, batch))
    for optimizer, variables in applied:
        if not optimizer.built:
            optimizer.build(variables)


def _outside_of_graphs(strategy: Strategy, create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    with tf.init_scope(), strategy.as_it_is():
        return create(**kwargs)


def _present(value: Structure) -> Structure:
    """Returns a part of a batch, or of its form, and None for an absent part."""
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else None


def _placeholder(value: Structure) -> Structure:
    """Returns the placeholder of a part of the batch in the graph; only a form says whether the size may differ."""
    if _present(value) is None:
        return None
    if isinstance(value, tf_internals.CompositeTensor):
        value = tf.type_spec_from_value(value)
    if isinstance(value, tf.TypeSpec):
        return tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), value, expand_composites=True
        )
    return tf.compat.v1.placeholder(value.dtype, [None, *value.shape[1:]] if len(value.shape) else ())


@contextlib.contextmanager
def _noting(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[list[tuple[Any, list[Any]]]]:
    """Makes `apply` of the optimizers note for which variables it is called, and do no more."""
    applied: list[tuple[Any, list[Any]]] = []

    def note(
        optimizer: keras.optimizers.Optimizer, grads: Sequence[Gradient], trainable_variables: Variables | None = None
    ) -> None:
        if trainable_variables:
            applied.append((optimizer, list(trainable_variables)))

    before = [vars(optimizer).get("apply") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.apply = functools.partial(note, optimizer)
    try:
        yield applied
    finally:
        for optimizer, apply in zip(optimizers, before, strict=True):
            del optimizer.apply
            if apply is not None:
                optimizer.apply = apply
