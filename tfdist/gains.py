"""Whether compression has been worth it: what a run says at its end."""

from __future__ import annotations

from collections.abc import Iterator

import keras

from tfdist import optimizer_search
from tfdist.optimizer import reduction_of

NONE_GAINED = (
    "tfdist: compression did not make steps faster here: the sum of the gradients takes {compressed:.1f} ms with it, and "
    "{plain:.1f} ms without"
)


def exchange_ms(model: keras.Model) -> dict[str, float] | None:
    """Returns how many milliseconds the sum of all gradients takes, `compressed` and `plain`; None without a compressor.

    Measured now, by summing numbers as many as the gradients have: a collective.
    """
    reductions = [each for optimizer in optimizer_search.optimizers(model) if (each := reduction_of(optimizer))]
    if not reductions:
        return None
    compressed, plain = zip(*(reduction.seconds() for reduction in reductions), strict=True)
    return {"compressed": round(sum(compressed) * 1000, 3), "plain": round(sum(plain) * 1000, 3)}


def faults(model: keras.Model) -> Iterator[str]:
    """Yields sentences about compressors that have not begun yet, and about updates that were left out."""
    for optimizer in optimizer_search.optimizers(model):
        if not (reduction := reduction_of(optimizer)):
            continue
        compressor, updates, left_out = (
            reduction.compressor,
            int(optimizer.iterations.numpy()),
            int(reduction.left_out.numpy()),
        )
        if updates <= compressor.begins > 0:
            yield (
                f"tfdist: nothing was compressed: {compressor.name} begins after {compressor.begins} updates, and this "
                f"training has made {updates}; lower start_powerSGD_iter or warmup_steps"
            )
        if left_out and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which means to
            yield (
                f"tfdist: {left_out} updates were left out, because a gradient was not finite, or too large for "
                f"{compressor.name}; fp16 ends at 65504"
            )
