"""The state of a compressor: made with the optimizer's, and kept beside it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.compression.base import Compressor
from tfdist.gradients.reduction import Reduction
from tfdist.gradients.update import AccumulatingUpdate


def warn_if_adaptive(optimizer: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    """Warns of a compressor whose gradients an optimizer should not divide by.

    Args:
        optimizer: The optimizer.
        compressor: What compresses its gradients.
    """
    kinds = [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta]
    kinds += [keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.Lamb]
    if not compressor.supports_adaptive_optimizers and isinstance(optimizer, tuple(kinds)):
        warnings.warn(
            f"{type(optimizer).__name__} divides by what gradients have been, which {compressor.description} makes rare and "
            "large: it may train worse, or not at all. Use compression 'powersgd' or 'int8' with it, or SGD with momentum.",
            stacklevel=3,
        )


class BuildCompressionState:
    """`build` of the optimizer: makes the compressor's state, too."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, compression: Compressor, update: AccumulatingUpdate):
        self._optimizer = optimizer
        self._build = optimizer.build
        self._compression = compression
        self._update = update
        if optimizer.built:
            self._make(update.variables)

    def __call__(self, variables: Sequence[Any]) -> None:
        self._build(variables)
        self._make(variables)

    def _make(self, variables: Sequence[Any]) -> None:
        strategy = variables and getattr(variables[0].value, "distribute_strategy", None)
        if not strategy or strategy.num_replicas_in_sync == 1:
            return  # it has nobody to send to
        self._update.reduction = reduction = Reduction(self._compression, variables)
        self._optimizer.compression_state = (
            reduction  # TensorFlow tracks it, so that checkpoints and backups hold its variables
        )
