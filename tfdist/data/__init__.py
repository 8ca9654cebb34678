"""Datasets: from arrays or generators, resumed at an example with their random state."""

from tfdist.data.arrays import epochs

__all__ = ["epochs"]
