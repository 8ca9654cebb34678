"""Lines for the user. No TensorFlow here."""

from __future__ import annotations


def log(sentence: str) -> None:
    """Prints a line for the user."""
    print(f"tfdist: {sentence}", flush=True)
