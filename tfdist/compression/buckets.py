"""Assigns gradients to buckets, and splits large gradients into parts, one bucket each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.collectives.requests import ReduceResult

_BYTES = 4  # of a float32


def assign_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Returns the buckets, each a list of indices of gradients that are reduced together.

    The order is that of the backward pass, from the last gradient to the first. So the first buckets are sent while backward
    still computes the others (Li et al., arXiv:2006.15704). A gradient of more than `most` bytes gets a bucket to itself; 0 means one
    bucket for all.
    """
    buckets: list[list[int]] = []
    free_bytes = 0
    for index in reversed(range(len(sizes))):
        free_bytes -= sizes[index]
        if not buckets or (most and free_bytes < 0):
            buckets.append([])
            free_bytes = most - sizes[index]
        buckets[-1].append(index)
    return buckets


def part_sizes(count: int, granularity: int, most: int) -> list[int]:
    """Returns the number of values in each part of a gradient of `count` values; a part has about `most` bytes or fewer, 0 for no limit.

    Parts begin at multiples of `granularity` values; 0 means that the gradient is not split.
    """
    if not (granularity and most) or count * _BYTES <= most:
        return [count]
    parts = -(-count * _BYTES // most)
    size = -(-count // (parts * granularity)) * granularity
    return [min(size, count - begin) for begin in range(0, count, size)]


def split(value: tf.Tensor, counts: Sequence[int]) -> list[tf.Tensor]:
    """Splits a tensor into flat parts of `counts` values. With one part, returns the tensor itself, with its shape."""
    return [value] if len(counts) == 1 else tf.split(tf.reshape(value, [-1]), counts)


def join(parts: Sequence[tf.Tensor], shape: tuple[int, ...]) -> tf.Tensor:
    """Joins the parts that `split` has returned to a tensor of `shape`."""
    return parts[0] if len(parts) == 1 else tf.reshape(tf.concat(parts, 0), shape)


def split_state(state: tuple[tf.Tensor, ...], counts: Sequence[int]) -> list[tuple[tf.Tensor, ...]]:
    """Splits the state of a gradient; returns the state of each part."""
    if not state:
        return [()] * len(counts)
    return list(zip(*(split(tensor, counts) for tensor in state), strict=True))


def join_results(
    reduced: ReduceResult, cuts: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]
) -> ReduceResult:
    """Joins the results of parts to the results of whole gradients; `cuts` are the `part_sizes` of each."""
    joined = ReduceResult([], [], [])
    begin = 0
    for counts, shape in zip(cuts, shapes, strict=True):
        sums, contributions, states = (field[begin : begin + len(counts)] for field in reduced)
        joined.sums.append(join(sums, shape))
        joined.contributions.append(join(contributions, shape))
        joined.states.append(tuple(join(parts, shape) for parts in zip(*states, strict=True)))
        begin += len(counts)
    return joined


def merge_results(parts: Iterable[tuple[Sequence[int], ReduceResult]], count: int) -> ReduceResult:
    """Merges the results of several buckets, pairs of indices and results, into one result for all `count` gradients."""
    merged = ReduceResult([None] * count, [None] * count, [()] * count)
    for indices, reduced in parts:
        for source, target in zip(reduced, merged, strict=True):
            for index, value in zip(indices, source, strict=True):
                target[index] = value
    return merged
