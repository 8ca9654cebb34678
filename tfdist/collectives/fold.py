"""`fold`: the sum of arrays in a given order, the same to the bit wherever it is computed. No TensorFlow here.

float16 and bfloat16 are added up in float32 and rounded once. TensorFlow's ring rounds after each addition: between two ranks that is
the same number, between more it is the less exact one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WIDE = 2**15  # numbers that are widened at once: they stay in a core's cache


def fold(values: Sequence[np.ndarray] | np.ndarray, out: np.ndarray, largest: bool) -> None:
    """Computes the sum (or maximum) of some arrays, in their order.

    Args:
        values: Arrays of one shape, `[numbers]`.
        out: For the result; none of them.
        largest: Whether to compute the maximum.
    """
    with np.errstate(all="ignore"):  # sums may be infinite or no number, as TensorFlow's; callers look for it
        _fold(values, out, np.maximum if largest else np.add)


def _fold(values: Sequence[np.ndarray] | np.ndarray, out: np.ndarray, join: np.ufunc) -> None:
    if len(values) == 1:
        out[...] = values[0]
    elif out.dtype.name not in ("float16", "bfloat16"):
        total = values[0]
        for value in values[1:]:
            total = join(total, value, out=out)
    else:
        for start in range(0, out.size, _WIDE):
            wide = values[0][start : start + _WIDE].astype(np.float32)
            for value in values[1:]:
                join(wide, value[start : start + _WIDE].astype(np.float32), out=wide)
            out[start : start + _WIDE] = wide.astype(out.dtype)
