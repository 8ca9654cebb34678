"""The chief's output during training: its replicas, Keras' progress, and missing updates."""

from __future__ import annotations

import sys
from typing import Any

import keras

from tfdist.compat import keras_internals, optimizer_search
from tfdist.runtime.log import is_terminal, logger


def describe_replicas(replicas: int, global_batch_size: int | None, asynchronous: bool) -> str:
    """Returns how many replicas train, and how a batch is split over them.

    Asynchronous workers count as replicas; each takes batches of the global size.
    """
    plural = "s" if replicas > 1 else ""
    name = "worker" if asynchronous else "replica"
    described = f"{replicas} {name}{plural}"
    if global_batch_size is None:
        return described
    if asynchronous:
        return f"{described}, each with batches of {global_batch_size}"
    part, rest = divmod(global_batch_size, replicas)
    share = ", dealt out evenly" if rest else f" = {replicas} x {part}"
    return f"{described}, global batch {global_batch_size}{share}"


def set_verbosity(arguments: dict[str, Any], is_chief: bool) -> None:
    """Sets `verbose` in arguments for Keras: 0 off the chief; one line per epoch where a progress bar cannot redraw its line."""
    # A bar redraws its line, which only a terminal or a notebook shows as one.
    redraws = "ipykernel" in sys.modules or is_terminal()
    if not is_chief:
        arguments["verbose"] = 0
    elif arguments.setdefault("verbose", "auto") in ("auto", 1) and not redraws:
        arguments["verbose"] = 2


def print_missing_update(model: keras.Model) -> None:
    """Prints a warning if the training was shorter than the accumulation of gradients, so that no weight was updated."""
    for optimizer in optimizer_search.optimizers(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        accumulated = getattr(inner, "gradient_accumulation_steps", None)
        if not accumulated or not inner.built:
            continue
        # Not `iterations`, in which Keras counts updates instead of steps.
        steps = int(keras_internals.step_counter(inner).numpy())
        if 0 < steps < accumulated:
            logger.warning(
                f"no weight was updated: the training had {steps} steps, fewer than gradient_accumulation_steps={accumulated}; "
                "train longer, or lower gradient_accumulation_steps."
            )
