"""Replacements of a model's `fit`, `evaluate`, `predict` and siblings, which call its Trainer; every rank may save the model.

Keras does not notify a strategy of a model between the model's creation and its training. So tfdist replaces these methods of
`keras.Model` when it creates its first strategy. They check the model's strategy, and call Keras' own methods for models of other
strategies. tfdist also replaces the functions that write models' files (see `saving`).
`save` and `export` of a trained model notify its Trainer, which removes the backups of the training run.

Another library may have replaced a method before, for example to log each `fit`. Its replacement stays in `keras.Model`, and Keras' own
method, which it calls, calls the Trainer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function
from tfdist.compat import keras_internals, tf_internals
from tfdist.compat.optimizer_search import optimizers_in_attributes
from tfdist.config import registry
from tfdist.errors import ConfigError
from tfdist.runtime.log import logger
from tfdist.strategies import saving
from tfdist.strategies.base import KerasStrategy

Method = Function


USE_TRAINER = "{0} trains models of a Trainer alone: make the model in the scope of tfdist.Trainer({0!r})."
_TRAINING = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_LOOP = "tfdist.training.loops:run_plain"  # of a higher row: imported when a model is first trained
_SAVING: dict[str, Callable[[Method], Method]] = {"save": lambda own: own, "export": saving.model_export}
_alone: weakref.WeakSet[keras.Model] = weakref.WeakSet()  # models of which a warning was logged
_ours: dict[str, Method] = {}  # what `install` has set, by name
_keras_own: dict[str, Method] = {}
_newest: Callable[[], Any] = lambda: None  # noqa: E731 (a weak reference to the strategy created last)


def install(strategy: KerasStrategy) -> None:
    """Replaces the methods of `keras.Model`, which the first call does, and records the newest strategy, in whose scope models should be built."""
    global _newest
    _newest = weakref.ref(strategy)
    makers: dict[str, Callable[[Method], Method]] = {name: functools.partial(_trained, name) for name in _TRAINING}
    makers["make_predict_function"] = _predicting
    makers["compile_from_config"] = _loaded
    makers |= {name: functools.partial(_saved, make) for name, make in _SAVING.items()}
    for name, make in makers.items():
        if name not in _ours:
            _replace(name, make)
    keras_internals.replace_writers(saving.keras_writer)
    tf_internals.stop_autotuning_on_devices()
    if strategy.traits.several_processes or strategy.traits.asynchronous:
        saving.checkpoints_by_one(strategy)


def _replace(name: str, make: Callable[[Method], Method]) -> None:
    method = getattr(keras.Model, name)
    inherited = keras_internals.inherited_method(name)
    cell = None
    if inherited not in (None, method):  # another library's method calls the inherited one
        cell = keras_internals.decorated_function_cell(inherited)
    own = cell.cell_contents if cell else method
    _keras_own[name] = own
    _ours[name] = make(own)
    if cell:
        cell.cell_contents = _ours[name]
    else:
        setattr(keras.Model, name, _ours[name])


def keras_own(name: str) -> Method:
    """Returns Keras' own method of this name."""
    return _keras_own.get(name) or getattr(keras.Model, name)


def is_replaced(method: Method, name: str) -> bool:
    """Returns whether a model's method is not the one that `install` has set: its class or another library has replaced it."""
    return method is not _ours.get(name)


def _trained(name: str, keras_own: Method) -> Method:
    @functools.wraps(keras_own)
    def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = model.distribute_strategy
        if not isinstance(strategy, KerasStrategy):
            if name in ("fit", "train_on_batch"):
                _check_optimizer(model)
                _warn_if_alone(model)
            return keras_own(model, *args, **kwargs)
        trainer = strategy.trainer
        if trainer is not None and not trainer.is_at_work:
            return trainer.call(name, keras_own, model, args, kwargs)
        if strategy.engine is None:
            raise ConfigError(USE_TRAINER.format(strategy.config.name))
        if not keras_internals.has_replaced_make_function(model):
            strategy.engine.attach(model)
        run: Function = registry.resolve("loop", _LOOP, {})
        return run(strategy.engine, name, keras_own, model, args, kwargs)

    return method


def _predicting(keras_own: Method) -> Method:
    """Returns a `make_predict_function` that makes the function of the model's engine, also for an override that calls `super()`."""

    @functools.wraps(keras_own)
    def method(model: keras.Model, force: bool = False) -> Any:
        make = keras_internals.make_prediction(model)
        if make is None:
            return keras_own(model, force)
        if model.predict_function is None or force:
            model.predict_function = make()
        return model.predict_function

    return method


def _loaded(keras_own: Method) -> Method:
    """Returns a `compile_from_config` that builds the optimizer of a file on the pieces of variables, with a mesh of workers."""

    @functools.wraps(keras_own)
    def method(model: keras.Model, config: dict[str, Any]) -> None:
        strategy = model.distribute_strategy
        if not isinstance(strategy, KerasStrategy) or strategy.mesh is None or not model.built:
            return keras_own(model, config)
        model.built = False  # or Keras builds the optimizer, on whole values
        try:
            keras_own(model, config)
        finally:
            model.built = True
        if model.compiled and strategy.engine is not None:
            strategy.engine.attach(model)
            model.optimizer.build(model.trainable_variables)
        return None

    return method


def _saved(make: Callable[[Method], Method], keras_own: Method) -> Method:
    """Returns a `Model.save` or `Model.export` that notifies the Trainer, unless `delete_backup=False`."""
    write = make(keras_own)

    @functools.wraps(keras_own)
    def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = model.distribute_strategy
        trainer = strategy.trainer if isinstance(strategy, KerasStrategy) else None
        if trainer is None:
            return write(model, *args, **kwargs)
        delete_backup = kwargs.pop("delete_backup", True)
        written = write(model, *args, **kwargs)
        if delete_backup:
            trainer.on_model_saved(model)
        return written

    return method


def _check_optimizer(model: keras.Model) -> None:
    """Raises ConfigError for a model without a strategy that was compiled in the newest strategy's scope: Keras could not make its slots."""
    strategy = _newest()
    if strategy is None or tf.distribute.has_strategy():
        return
    inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers_in_attributes(model)]
    if any(keras_internals.is_created_in_scope(optimizer, strategy) for optimizer in inner):
        raise ConfigError(
            f"model {model.name!r} was compiled in the scope of this process's Trainer, and built outside of it. Build (or load) it there, "
            "too: in `with trainer.scope():`."
        )


def _warn_if_alone(model: keras.Model) -> None:
    """Warns, once for each model, that this process trains it alone, if its scope seems to have been forgotten.

    This is not an error: a helper model may be trained alone on purpose. If a callback trains it, no warning is logged.
    """
    strategy = _newest()
    if (
        strategy is None
        or strategy.trainer is None
        or strategy.trainer.is_at_work
        or model in _alone
        or tf.distribute.has_strategy()
    ):
        return
    if model.distribute_strategy is not tf.distribute.get_strategy():
        return  # the model belongs to another strategy
    if strategy.num_replicas_in_sync > 1 or strategy.traits.asynchronous:
        _alone.add(model)
        logger.warning(
            f"model {model.name!r} was not built in the scope of this process's Trainer: this process trains it alone. Build (or "
            "load) and compile it in `with trainer.scope():`."
        )
