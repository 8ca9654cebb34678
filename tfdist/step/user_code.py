"""Errors of the user's code that Keras' loops would take for something else."""

from __future__ import annotations

import os
import traceback


def stop_iteration_error(where: str, error: StopIteration) -> RuntimeError:
    """Returns what is raised in place of StopIteration, by which Keras' loops mean the end of the data.

    Args:
        where: The function that has raised it.
        error: What it has raised; the message names its line, as Keras drops the causes of errors.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RuntimeError(
        f"{where} raised StopIteration ({os.path.basename(frame.filename)}:{frame.lineno}), which would end the epoch as if the data were at their end. Is a next() in it without a "
        "default? To end the training, set model.stop_training = True."
    )
