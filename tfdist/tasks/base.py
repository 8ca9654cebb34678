"""`Task`: the user's model and data for `tfdist train`. No TensorFlow at import.

A configuration names its task before TensorFlow is loaded, so a task's module imports TensorFlow and Keras inside the
methods that need them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclasses.dataclass
class NoOptions:
    """Options of a task without options."""


class Task:
    """A model, its arguments of `compile`, and its data. Subclass it, and refer to the subclass as `package.module:Class`.

    Args:
        options: An instance of the class attribute `Options`.

    Attributes:
        Options: A dataclass with defaults: `--config.task_options.NAME=VALUE` sets its fields. An optional method
            `faults` yields a message for each invalid value. An attribute that is not a field counts as a misspelled field,
            unless it begins with `_`.

    Examples:
        >>> import dataclasses, keras, tensorflow as tf, tfdist
        >>> @dataclasses.dataclass
        ... class Options:
        ...     units: int = 8
        >>> class Ones(tfdist.Task):
        ...     Options = Options
        ...     def model(self):
        ...         return keras.Sequential([keras.Input((4,)), keras.layers.Dense(self.options.units)])
    """

    Options: type = NoOptions

    def __init__(self, options: Any):
        self.options = options

    def build_model(self) -> keras.Model:
        """Returns the model, not compiled. Called in the strategy's scope, on every rank."""
        raise NotImplementedError

    def compile_arguments(self) -> dict[str, Any]:
        """Returns the arguments for `model.compile` besides the optimizer. Called in the strategy's scope."""
        raise NotImplementedError

    def steps_per_epoch(self, global_batch_size: int) -> int | None:
        """Returns the number of steps in an epoch, or None if `train_data` ends by itself."""
        return None

    def train_data(self, context: tf.distribute.InputContext, global_batch_size: int, seed: int) -> tf.data.Dataset:
        """Returns this input pipeline's training data, in batches for each replica.

        Must be a pure function of its arguments, so that every rank agrees and a run can be repeated.
        `tfdist.data.epochs` creates such a dataset from arrays.

        Args:
            context: The number of input pipelines, and this pipeline's id.
            global_batch_size: Examples per step over all replicas.
            seed: The run's seed.
        """
        raise NotImplementedError

    def eval_data(self, global_batch_size: int) -> tf.data.Dataset | None:
        """Returns all validation data in batches of `global_batch_size`, or None. The strategy shards the dataset."""
        return None
