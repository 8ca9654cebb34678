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
    """Returns the values joined in pairs of neighbors, then the results in pairs, until one is left.

    Args:
        values: At least one value, in the order of the replicas.
        join: Joins two values.
    """
    level = list(values)
    while len(level) > 1:
        level = [join(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def is_exact(replicas: int, processes: int) -> bool:
    """Returns whether sums over `replicas` have the same bits in `processes` processes as in one."""
    local = replicas // processes
    return processes == 1 or local & (local - 1) == 0
