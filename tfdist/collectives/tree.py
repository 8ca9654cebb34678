"""The order in which values of replicas are added: a binary tree over the replicas. No TensorFlow here.

Neighbors are added first, `(0 + 1) + (2 + 3)`. If a level has an odd number of values, the last one moves to the next level. If a
process has 1, 2, 4, ... replicas, they are a whole branch of the tree: the process adds their values first and sends one sum. The
sum has the same bits wherever the replicas run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def fold(values: Sequence[Value], join: Callable[[Value, Value], Value]) -> Value:
    """Returns the values joined in pairs of neighbors, then the results in pairs, until one is left. There is at least one value."""
    level = list(values)
    while len(level) > 1:
        joined = [join(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = joined + level[2 * len(joined) :]
    return level[0]
