"""The features of models and optimizers that exclude others, by their keys in `config/relations.py`."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.compat import keras_internals
from tfdist.compat.optimizer_search import optimizers
from tfdist.config import relations

# The classes themselves: a subclass may compute with whole variables.
ELEMENTWISE = tuple(getattr(keras.optimizers, name) for name in relations.ELEMENTWISE)


def of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """Returns the features of an optimizer, and of the one that it wraps, with the names that an error has for them."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    named = f"the optimizer {type(inner).__name__}"
    known = {
        "mixed_float16": ("", inner is not optimizer),
        "gradient_accumulation_steps": ("", inner.gradient_accumulation_steps),
        "use_ema": (f"use_ema=True of {named}", inner.use_ema),
        "ema_overwrite_frequency": ("", inner.use_ema and inner.ema_overwrite_frequency),
        "not_elementwise": (named, type(inner) not in ELEMENTWISE),
        "own_apply": (named, type(inner).apply_gradients is not keras.optimizers.Optimizer.apply_gradients),
        "MultiOptimizer": ("", "MultiOptimizer" in (type(inner).__name__, type(optimizer).__name__)),
        "Muon": ("", isinstance(inner, keras.optimizers.Muon)),
        "Nadam": ("", isinstance(inner, keras.optimizers.Nadam)),
    }
    return relations.present(known)


def of_model(model: keras.Model) -> dict[str, str]:
    """Returns the features of a compiled model and of its optimizers, with the names that an error has for them."""
    own = type(model).__name__
    step = vars(model).get("train_step", type(model).train_step)
    layers = keras_internals.layers(model)

    def held(text: str, holders: Sequence[keras.layers.Layer]) -> tuple[str, object]:
        return text.format(", ".join(layer.name for layer in holders)), holders

    known = {
        "jit_compile": ("", model.jit_compile),
        "run_eagerly": ("", model.run_eagerly),
        "own_train_step": (f"the train_step of {own}", not keras_internals.is_keras_method(model, "train_step")),
        "own_compute_metrics": (
            f"the compute_metrics of {own}",
            not keras_internals.is_keras_method(model, "compute_metrics"),
        ),
        "function_step": (
            f"the train_step of {own} (a tf.function)",
            isinstance(step, tf.types.experimental.PolymorphicFunction),
        ),
        "float8": ("", any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables)),
        "synchronized": held(
            "synchronized=True of the layer {}", [each for each in layers if getattr(each, "synchronized", False)]
        ),
        "stateful": held(
            "stateful=True of the layer {}",
            [each for each in layers if isinstance(each, keras.layers.RNN) and each.stateful],
        ),
        "spectral": held(
            "SpectralNormalization (the layer {})",
            [each for each in layers if isinstance(each, keras.layers.SpectralNormalization)],
        ),
    }
    found = relations.present(known)
    for optimizer in optimizers(model):
        found |= of_optimizer(optimizer)
    return found
