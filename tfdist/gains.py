"""Whether compression has been worth it: what a run says at its end."""

from __future__ import annotations

import keras

from tfdist import refusals
from tfdist.optimizer import reduction_of

NONE_GAINED = (
    "tfdist: compression did not make steps faster here: the sum of the gradients takes {compressed:.1f} ms with it, and "
    "{plain:.1f} ms without"
)


def exchange_ms(model: keras.Model) -> dict[str, float] | None:
    """Returns how many milliseconds the sum of all gradients takes, `compressed` and `plain`; None without a compressor.

    Measured now, by summing numbers as many as the gradients have: a collective.
    """
    reductions = [each for optimizer in refusals.optimizers(model) if (each := reduction_of(optimizer))]
    if not reductions:
        return None
    compressed, plain = zip(*(reduction.seconds() for reduction in reductions), strict=True)
    return {"compressed": round(sum(compressed) * 1000, 3), "plain": round(sum(plain) * 1000, 3)}


def not_begun(model: keras.Model) -> str | None:
    """Returns a sentence if a compressor that leaves the first updates as they are has not begun yet."""
    for optimizer in refusals.optimizers(model):
        reduction = reduction_of(optimizer)
        updates = int(optimizer.iterations.numpy())
        if reduction and updates <= reduction.compressor.begins > 0:
            return (
                f"tfdist: nothing was compressed: {reduction.compressor.name} begins after {reduction.compressor.begins} "
                f"updates, and this training has made {updates}; lower start_powerSGD_iter or warmup_steps"
            )
    return None
