"""The effect of compression: the planned bytes of a step, the time of an exchange, and warnings if it has no effect."""

from __future__ import annotations

from collections.abc import Iterator

import keras

from tfdist.compat import keras_internals, optimizer_search
from tfdist.compression.base import NONE, Compressor
from tfdist.gradients.optimizer import get_reduction

NO_GAIN_WARNING = (
    "compression did not make steps faster here: the sum of the gradients takes {compressed:.1f} ms with compression, "
    "and {plain:.1f} ms without"
)


def exchange_ms(model: keras.Model) -> dict[str, float] | None:
    """Measures the milliseconds of a sum of all gradients, `compressed` and `plain`; returns None without a compressor.

    The measurement sums tensors of the gradients' sizes now, which is a collective: all ranks must call it.
    """
    reductions = [each for optimizer in optimizer_search.optimizers(model) if (each := get_reduction(optimizer))]
    if not reductions:
        return None
    compressed, plain = zip(*(reduction.seconds() for reduction in reductions), strict=True)
    return {"compressed": round(sum(compressed) * 1000, 3), "plain": round(sum(plain) * 1000, 3)}


def faults(model: keras.Model) -> Iterator[str]:
    """Yields warnings about compressors that have not started yet, and about skipped updates."""
    for optimizer in optimizer_search.optimizers(model):
        if not (reduction := get_reduction(optimizer)):
            continue
        compressor, updates, left_out = (
            reduction.compressor,
            int(optimizer.iterations.numpy()),
            int(reduction.left_out.numpy()),
        )
        if updates <= compressor.start_step > 0:
            yield (
                f"nothing was compressed: {compressor.description} starts after {compressor.start_step} updates, but this "
                f"training has made {updates}; lower start_powerSGD_iter or warmup_steps"
            )
        # Skipping updates is intended there.
        if left_out and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            yield (
                f"{left_out} updates were skipped, because a gradient was not finite, or too large for "
                f"{compressor.description}; the largest value of fp16 is 65504"
            )


def planned_bytes(model: keras.Model, compression: Compressor | None, replicas: int) -> int | None:
    """Returns the bytes that each rank sends for the gradients of a step; None if they depend on the batch.

    With accumulated gradients, an update's bytes are divided by its number of steps.

    Args:
        model: The model. With an embedding the result is None: its gradient has a row for each word of the batch.
        compression: The compressor, or None.
        replicas: The number of ranks.
    """
    variables = model.trainable_variables
    if any(variable.dtype != "float32" for variable in variables) or any(
        map(_is_sparse, keras_internals.layers(model))
    ):
        return None
    shapes = {variable.path: tuple(variable.shape) for variable in variables}
    optimizer = getattr(model, "optimizer", None)
    steps = getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None) or 1
    return round((compression or NONE).bytes_per_step(shapes, replicas) / steps)


def _is_sparse(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)
