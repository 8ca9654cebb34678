"""Checks of what a `Trainer` is given: its strategy, its cluster, its models, their callbacks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.compat import unsupported
from tfdist.config import StrategyConfig, nan_policy
from tfdist.errors import ConfigError, unknown_name_message
from tfdist.training.callback_kinds import place_attribute


def check_strategy(strategy: tf.distribute.Strategy, options: Collection[str]) -> None:
    """Checks a strategy that the user has created.

    Args:
        strategy: The strategy.
        options: The names of the options given beside it.

    Raises:
        ConfigError: `tfdist.create_strategy` did not make it, or there are options, which only go with a name.
    """
    if not hasattr(strategy, "statistics") or options:
        raise ConfigError(
            "strategy must be a name, a StrategyConfig, or a strategy made by tfdist.create_strategy, and options "
            f"go with the first two. Received: {type(strategy).__name__}, options {sorted(options)}."
        )


def check_options(trainer: type, strategy: Any, options: Collection[str]) -> None:
    """Checks the names of arguments that a trainer does not have itself.

    Args:
        trainer: The trainer's class.
        strategy: What it is given as strategy; options go with a name.
        options: The names.

    Raises:
        ConfigError: One is neither an argument nor an option of a strategy.
    """
    fields = {field.name for field in dataclasses.fields(StrategyConfig)} - {"name"}
    known = fields | {*inspect.signature(trainer).parameters} - {"options"}
    faults = [unknown_name_message("argument of Trainer", name, known) for name in options if name not in fields]
    if faults and isinstance(strategy, str):
        raise ConfigError(faults)


def check_nan_policy(policy: str, strategy: Any) -> None:
    """Checks that a strategy can do with steps that are not finite what it is asked to.

    Args:
        policy: As `nan_policy` of `Trainer`.
        strategy: The strategy.

    Raises:
        ConfigError: There is no such policy, or the strategy cannot follow it.
    """
    if faults := list(nan_policy.faults(policy, strategy.kind, strategy.traits)):
        raise ConfigError(faults)


def check_trains_alone(found: tuple[ClusterSpec, TaskSpec] | None, strategy: str) -> None:
    """Checks that a strategy of one process does not run on one of several training tasks.

    Each task would train the whole model and overwrite the files of the others.

    Args:
        found: The cluster and this process's task in it, or None without a cluster.
        strategy: The name of the strategy's class.

    Raises:
        ConfigError: The cluster has several training tasks, and this process is one of them.
    """
    if found and found[1].type != "evaluator" and len(found[0].training_tasks()) > 1:
        raise ConfigError(
            f"{strategy} trains in one process, but this one is {found[1]} of {len(found[0].training_tasks())} training "
            "tasks; use strategy multi_worker_mirrored, or, for trainings apart from each other, cluster=False "
            "(--config.cluster.source=none)."
        )


def check_model(model: Any, strategy: tf.distribute.Strategy, method: str) -> None:
    """Checks that a strategy can train a model.

    Args:
        model: The first argument of a method of the trainer.
        strategy: The trainer's strategy.
        method: The method's name.

    Raises:
        ConfigError: It is no Keras model, was built outside of the trainer's scope, or holds something that tfdist
            does not support.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{method} takes the model first: trainer.{method}(model, x, ...). Received: {type(model).__name__}."
        )
    if model.distribute_strategy is not strategy:
        raise ConfigError(
            f"Model {model.name!r} was not built in this trainer's scope: build and compile it in "
            "`with trainer.scope():`."
        )
    unsupported.check_model(model)


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Checks that writers have the place they name.

    Args:
        callbacks: The user's callbacks.

    Raises:
        ConfigError: `writes` names an attribute that its callback does not have.
    """
    for callback in callbacks:
        if (name := place_attribute(callback)) and not hasattr(callback, name):
            raise ConfigError(
                f"{type(callback).__name__}.writes must name the attribute that says where the callback writes. Received: "
                f"{name!r}, which the callback does not have. Set self.{name} in its __init__."
            )
