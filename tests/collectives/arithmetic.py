"""What a transport must return, to the bit; without TensorFlow."""

import ml_dtypes
import numpy as np

TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint16, np.bool_]
METHODS = ["sum", "largest", "all_gather", "all_to_all", "reduce_scatter"]
PIECE = 4096


def numbers(seed, shape, dtype, rank):
    draw = np.random.default_rng([*seed, rank])
    if np.dtype(dtype).kind in "iub":
        return draw.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)
    found = draw.standard_normal(shape) * 10.0 ** draw.integers(-4, 5, shape)  # so that the order of sums matters
    return np.asarray(found).astype(dtype)


def total(values, largest):
    """Returns the sum to the bit: neighbors first, each sum of 16 bits rounded."""
    join = np.maximum if largest else np.add
    values, halves = list(values), values[0].dtype.name in ("float16", "bfloat16")

    def joined(left, right):
        if not halves:
            return join(left, right)
        with np.errstate(over="ignore"):
            return np.asarray(join(left.astype(np.float32), right.astype(np.float32))).astype(left.dtype)

    while len(values) > 1:
        values = [joined(*pair) if len(pair := values[i : i + 2]) == 2 else pair[0] for i in range(0, len(values), 2)]
    return values[0]


def sum_by_host(values, largest, hosts):
    """Returns what the sum must be where it is made within hosts first, if any are given."""
    return total([total([values[rank] for rank in ranks], largest) for ranks in hosts or [range(len(values))]], largest)


def same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found.shape, expected.shape)
    assert found.tobytes() == expected.tobytes(), (found, expected)


def check(transport, method, shape, dtype, seed, hosts=None):
    rank, size = transport.rank, transport.size
    if method in ("all_to_all", "reduce_scatter"):
        shape = (size, *shape)
    values = [numbers(seed, shape, dtype, each) for each in range(size)]
    mine = values[rank].copy()
    if method in ("sum", "largest"):
        same(transport.all_reduce(mine, largest=method == "largest"), sum_by_host(values, method == "largest", hosts))
        same(mine, values[rank])
    elif method == "reduce_scatter":
        same(transport.reduce_scatter(mine), sum_by_host(values, False, hosts)[rank])
        same(mine, values[rank])
    elif method == "all_gather":
        same(transport.all_gather(mine), np.stack(values))
        same(mine, values[rank])
    else:
        same(transport.all_to_all(mine), np.stack([value[rank] for value in values]))
        same(mine, values[rank])


def check_all(transport, hosts=None):
    """Compares each method with NumPy, on all ranks at once, for sizes about that of a piece; `hosts` as for `sum_by_host`."""
    rank, size = transport.rank, transport.size
    shapes = [(), (0,), (1,), (7,), (3, 5), (PIECE - 1,), (8 * PIECE + 1,), (3, 0), (5 * PIECE // 4, 2)]
    for dtype in TYPES:
        for number, shape in enumerate(shapes):
            for method in METHODS:
                check(transport, method, shape, dtype, [number], hosts)
    strided = np.arange(40_000, dtype=np.float32).reshape(200, 200)[:, ::2]
    expected = strided * size
    same(transport.all_reduce(strided), expected)
    huge = transport.all_reduce(np.full(9, 6e4, np.float16))
    assert np.isinf(huge).all() == (size > 1)
    nan = np.full(9999, np.nan if rank == size - 1 else 1, np.float32)
    for largest in (False, True):
        assert np.isnan(transport.all_reduce(nan, largest)).all()
