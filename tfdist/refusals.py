"""What Keras 3 or TensorFlow cannot do with several replicas, said in a sentence before it crashes, hangs or miscounts."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigError

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_STRATEGY = "_distribution_strategy"
KERAS_ADAPTER = "data_adapter"
KERAS_SELF_FEEDING = ("PyDatasetAdapter", "GeneratorDataAdapter", "TorchDataLoaderAdapter", "GrainDatasetAdapter")

_TRAINER = "use tfdist.Trainer(...).fit, evaluate and predict instead of the model's own."


def check_bare(step: Any) -> None:
    """Refuses what only the Trainer cures.

    Args:
        step: The function that a strategy with several replicas is to run. Stock Keras gives the model's own
            `train_step` or `test_step`, the Trainer does not.

    Raises:
        ConfigError: With every fault.
    """
    model = getattr(step, "__self__", None)
    if isinstance(model, keras.Model) and (faults := list(_bare_faults(model, step.__name__ == "train_step"))):
        raise ConfigError(faults)


def _bare_faults(model: keras.Model, trains: bool) -> Iterator[str]:
    if model.jit_compile:
        yield f"jit_compile=True compiles the collectives, too, which XLA cannot: {_TRAINER}"
    if model.steps_per_execution > 1:
        yield f"steps_per_execution={model.steps_per_execution} fails in Keras 3 with several replicas: {_TRAINER}"
    optimizer = model.optimizer
    if not trains or not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield f"mixed_float16 (a LossScaleOptimizer) looks for inf on one replica alone: {_TRAINER}"
        optimizer = optimizer.inner_optimizer
    if optimizer.gradient_accumulation_steps:
        yield f"gradient_accumulation_steps fails in Keras 3 with several replicas: {_TRAINER}"
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        yield f"ema_overwrite_frequency fails in Keras 3 with several replicas: {_TRAINER}"


def check_model(model: keras.Model) -> None:
    """Refuses what the Trainer does not cure either.

    Raises:
        ConfigError: With every fault.
    """
    if faults := list(_model_faults(model)):
        raise ConfigError(faults)


def _model_faults(model: keras.Model) -> Iterator[str]:
    optimizer = getattr(model, "optimizer", None)
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if getattr(inner, KERAS_STRATEGY, model.distribute_strategy) is not model.distribute_strategy:
        yield (
            f"The optimizer {type(inner).__name__} was created outside of this trainer's scope: create it in "
            "`with trainer.scope():`, or give its name."
        )
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    if model.jit_compile and type(model).train_step is not keras.Model.train_step:
        yield (
            f"jit_compile=True compiles a train_step up to its gradients, and the one of {type(model).__name__} may do "
            "more after them: compile the model with jit_compile=False."
        )
    if not isinstance(model.distribute_strategy, tf.distribute.experimental.CentralStorageStrategy):
        return
    remedy = "is not possible under central_storage, whose replicas share their variables; use strategy mirrored."
    if model.jit_compile:
        yield f"jit_compile=True {remedy}"
    if inner is not optimizer:
        yield f"mixed_float16 (a LossScaleOptimizer) {remedy}"
    if getattr(inner, "use_ema", False):
        yield f"use_ema=True {remedy}"


def check_data(strategy: tf.distribute.Strategy, data: Any) -> None:
    """Refuses data that each worker would draw for itself.

    Args:
        strategy: The strategy.
        data: What `fit`, `evaluate` or `predict` takes as `x`, or the Keras object that is about to distribute it.

    Raises:
        ConfigError: `data` is a generator or the like, and there are several workers.
    """
    kind = type(getattr(data, KERAS_ADAPTER, data)).__name__
    draws = kind in (*KERAS_SELF_FEEDING, "DataLoader") or (
        not hasattr(data, KERAS_ADAPTER) and isinstance(data, (keras.utils.PyDataset, collections.abc.Iterator))
    )
    if draws and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.num_workers > 1:
        raise ConfigError(
            f"Data from Python ({kind.removesuffix('Adapter')}) cannot be split among workers: each would draw batches of "
            "its own. Give arrays, a tf.data.Dataset that is the same on all workers, or to tfdist.Trainer a function "
            "(tf.distribute.InputContext) -> tf.data.Dataset that returns one worker's batches."
        )
