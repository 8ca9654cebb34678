"""The effect of compression: the planned bytes of a step, the time of an exchange, and warnings if it has no effect."""

from __future__ import annotations

from collections.abc import Iterator

import keras

from tfdist.compat import keras_internals, optimizer_search
from tfdist.compression.base import NONE, Compressor
from tfdist.gradients import local_steps
from tfdist.gradients.optimizer import get_reduction
from tfdist.strategy import as_ours

NO_GAIN_WARNING = (
    "compression did not make steps faster here: the sum of the gradients takes {compressed:.1f} ms with compression, "
    "and {plain:.1f} ms without"
)


def exchange_ms(model: keras.Model) -> dict[str, float] | None:
    """Measures the milliseconds of a sum of all gradients, `compressed` and `plain`; returns None without a compressor.

    The measurement sums tensors of the gradients' sizes now, which is a collective: all ranks must call it.
    """
    reductions = list(filter(None, map(get_reduction, optimizer_search.optimizers(model))))
    if not reductions:
        return None
    compressed, plain = zip(*(reduction.seconds() for reduction in reductions), strict=True)
    return {"compressed": round(sum(compressed) * 1000, 3), "plain": round(sum(plain) * 1000, 3)}


def faults(model: keras.Model) -> Iterator[str]:
    """Yields warnings about compressors that have not started yet or save no time, and about skipped updates."""
    ours = as_ours(model.distribute_strategy)
    is_one_host = ours is not None and ours.transport == "shared_memory"
    for optimizer in optimizer_search.optimizers(model):
        reduction = get_reduction(optimizer)
        if not reduction:
            continue
        compressor = reduction.compressor
        local = local_steps.of_optimizer(optimizer)
        counter = local.exchanges if local else optimizer.iterations
        updates = int(counter.numpy())
        left_out = int(reduction.left_out.numpy())
        if updates <= compressor.start_step > 0:
            yield (
                f"nothing was compressed: {compressor.description} starts after {compressor.start_step} updates, but this "
                f"training has made {updates}; lower start_powerSGD_iter or warmup_steps"
            )
        if is_one_host:
            yield (
                f"{compressor.description} saves no time among workers of one host, where sums of float32 are faster: remove the "
                "compression, or use it between hosts and measure its gain by trainer.compression_report(model)"
            )
        # Skipping updates is intended there.
        if left_out and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            yield (
                f"{left_out} updates were skipped, because a gradient was not finite, or too large for "
                f"{compressor.description}; the largest value of fp16 is 65504"
            )


def planned_bytes(model: keras.Model, compression: Compressor | None, replicas: int) -> int | None:
    """Returns the bytes that each rank sends for the gradients of a step; None if they depend on the batch.

    With accumulated gradients, an update's bytes are divided by its number of steps; with `sync_every` an exchange's by its number of updates.
    """
    variables = model.trainable_variables
    if any(variable.dtype != "float32" for variable in variables):
        return None
    # The gradient of an embedding has a row for each word of the batch.
    if any(isinstance(layer, keras.layers.Embedding) for layer in keras_internals.layers(model)):
        return None
    shapes = {variable.path: tuple(variable.shape) for variable in variables}
    optimizer = getattr(model, "optimizer", None)
    steps = getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None) or 1
    sent: float = (compression or NONE).bytes_per_step(shapes, replicas)
    strategy = as_ours(model.distribute_strategy)
    if strategy and strategy.config.sync_intervals:
        _, steps_alone = strategy.config.sync_intervals[-1]
        steps *= steps_alone
    if strategy and strategy.config.weights_dtype != "float32":
        sent -= NONE.bytes_per_step(shapes, replicas) / 4  # half of the second half of a sum, the all-gather of weights
    return round(sent / steps)
