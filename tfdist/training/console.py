"""The chief's output during training: its replicas, Keras' progress, and missing updates."""

from __future__ import annotations

import sys

import keras

from tfdist.compat import optimizer_search
from tfdist.runtime.log import is_terminal, logger


def describe_replicas(replicas: int, global_batch_size: int | None, asynchronous: bool) -> str:
    """Returns how many replicas train, and how a batch is split over them.

    Asynchronous workers count as replicas; each takes batches of the global size.
    """
    number, batch = replicas, global_batch_size
    if asynchronous:
        batches = "" if batch is None else f", each with batches of {batch}"
        return f"{number} worker{'s' if number > 1 else ''}{batches}"
    share = f" = {number} x {(batch or 0) // number}" if batch and batch % number == 0 else ", dealt out evenly"
    batches = "" if batch is None else f", global batch {batch}{share}"
    return f"{number} replica{'s' if number > 1 else ''}{batches}"


def verbosity(verbose: str | int, is_chief: bool) -> str | int:
    """Returns the `verbose` that Keras gets: 0 off the chief; one line per epoch where a progress bar cannot redraw its line."""
    if not is_chief:
        return 0
    # A bar redraws its line, which only a terminal or a notebook shows as one.
    redraws = "ipykernel" in sys.modules or is_terminal()
    return verbose if redraws or verbose not in ("auto", 1) else 2


def print_missing_update(model: keras.Model) -> None:
    """Prints a warning if the training was shorter than the accumulation of gradients, so that no weight was updated."""
    for optimizer in optimizer_search.optimizers(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        accumulated = getattr(inner, "gradient_accumulation_steps", None)
        if accumulated and inner.built and 0 < (steps := int(inner.iterations.numpy())) < accumulated:
            logger.warning(
                f"no weight was updated: the training had {steps} steps, fewer than gradient_accumulation_steps={accumulated}; "
                "train longer, or lower gradient_accumulation_steps."
            )
