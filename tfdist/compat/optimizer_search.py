"""Search for the optimizers that a model's training step may use."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.compat.keras_internals import is_created_in_scope

# Objects of these packages hold no optimizer of a user, except Keras' layers.
_CLOSED = ("builtins", "keras", "tensorflow", "numpy", "tfdist")


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that a model holds: its own attributes' first, then those of its layers and helper objects.

    The list omits an optimizer that a `LossScaleOptimizer` in it wraps. It also omits optimizers of layers and helper objects that
    belong to another strategy, because no step of this model can use them.
    """
    in_attributes = optimizers_in_attributes(model)
    strategy = model.distribute_strategy
    deeper = [
        optimizer
        for optimizer in _optimizers_in_parts(model)
        if is_created_in_scope(_wrapped_optimizer(optimizer), strategy)
    ]
    return _without_wrapped([*in_attributes, *deeper])


def optimizers_in_attributes(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizer that a model is compiled with, and those in its attributes, lists and dicts included."""
    values = [getattr(model, "optimizer", None), *_flatten(vars(model), set())]
    return _without_wrapped([value for value in values if isinstance(value, keras.optimizers.Optimizer)])


def _optimizers_in_parts(model: keras.Model) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers of layers, compiled sub-models and helper objects, however deep."""
    seen = {id(model)}
    parts = [model]
    while parts:
        for value in _flatten(vars(parts.pop(0)), seen):
            if isinstance(value, keras.optimizers.Optimizer):
                yield value
            elif _is_open(value) and id(value) not in seen:
                seen.add(id(value))
                parts.append(value)


def _flatten(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the items of nested lists, tuples, sets and dicts, each once."""
    if not isinstance(value, (dict, list, tuple, set)):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        items = value.values() if isinstance(value, dict) else value
        for item in list(items):
            yield from _flatten(item, seen)


def _is_open(value: Any) -> bool:
    """Returns whether an object's attributes may hold an optimizer."""
    if isinstance(value, keras.layers.Layer):
        return True
    closed = isinstance(value, (type, types.ModuleType)) or type(value).__module__.split(".")[0] in _CLOSED
    return not closed and hasattr(value, "__dict__")


def _wrapped_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _without_wrapped(candidates: list[keras.optimizers.Optimizer]) -> list[keras.optimizers.Optimizer]:
    """Returns each optimizer once, except optimizers that another one in the list wraps."""
    wrapped = {id(_wrapped_optimizer(o)) for o in candidates if _wrapped_optimizer(o) is not o}
    return list({id(o): o for o in candidates if id(o) not in wrapped}.values())
