"""Datasets: from arrays or generators, the same for all workers or their own, resumed at an example with their random state."""

from tfdist.data.arrays import epochs
from tfdist.data.worker_rows import own_rows

__all__ = ["epochs", "own_rows"]
