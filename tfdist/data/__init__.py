"""Datasets from arrays or generators, shared by all workers or separate, which resume at an example with their random state."""

from tfdist.data.arrays import epochs
from tfdist.data.worker_rows import own_rows

__all__ = ["epochs", "own_rows"]
