"""Errors of the user's code that Keras' loops would take for something else."""

from __future__ import annotations


def stop_iteration_error(where: str) -> RuntimeError:
    """Returns what is raised in place of StopIteration, by which Keras' loops mean the end of the data.

    Args:
        where: The function that has raised it.
    """
    return RuntimeError(
        f"{where} raised StopIteration, which would end the epoch as if the data were at their end. Is a next() in it without a "
        "default? To end the training, set model.stop_training = True."
    )
