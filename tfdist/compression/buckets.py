"""Gradients in buckets, and large ones in parts of which each is in a bucket of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.collectives.requests import ReduceResult

_BYTES = 4  # of a number


def assign_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Returns the places of gradients that are summed at the same time, bucket by bucket.

    They begin with the last one, as backward does, so that the first buckets travel while backward computes the others (Li et
    al., arXiv:2006.15704).

    Args:
        sizes: The bytes of each gradient, in the order of the model's variables.
        most: The bytes of a bucket; a gradient that has more is a bucket of its own. 0 means one bucket.
    """
    found: list[list[int]] = []
    left = 0
    for place in reversed(range(len(sizes))):
        left -= sizes[place]
        if not found or (most and left < 0):
            found.append([])
            left = most - sizes[place]
        found[-1].append(place)
    return found


def part_sizes(count: int, granularity: int, most: int) -> list[int]:
    """Returns how many numbers each part of a gradient has, so that none has many more bytes than `most`.

    Args:
        count: How many numbers the gradient has.
        granularity: How many numbers in a row stay together; 0 means all.
        most: Bytes; 0 means no limit.
    """
    if not (granularity and most) or count * _BYTES <= most:
        return [count]
    parts = -(-count * _BYTES // most)
    each = -(-count // (parts * granularity)) * granularity
    return [min(each, count - begin) for begin in range(0, count, each)]


def split(value: tf.Tensor, counts: Sequence[int]) -> list[tf.Tensor]:
    """Returns a value's numbers in parts, or where there is one part, the value."""
    return [value] if len(counts) == 1 else tf.split(tf.reshape(value, [-1]), counts)


def join(parts: Sequence[tf.Tensor], shape: tuple[int, ...]) -> tf.Tensor:
    """Returns the value of this shape that `split` has cut."""
    return parts[0] if len(parts) == 1 else tf.reshape(tf.concat(parts, 0), shape)


def split_state(state: tuple[tf.Tensor, ...], counts: Sequence[int]) -> list[tuple[tf.Tensor, ...]]:
    """Returns a gradient's state, as its parts have it."""
    return list(zip(*(split(each, counts) for each in state), strict=True)) if state else [()] * len(counts)


def join_results(
    reduced: ReduceResult, cuts: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]
) -> ReduceResult:
    """Returns the gradients of which parts have been reduced."""
    found = ReduceResult([], [], [])
    begin = 0
    for counts, shape in zip(cuts, shapes, strict=True):
        totals, sent, states = (each[begin : begin + len(counts)] for each in reduced)
        found.sums.append(join(totals, shape))
        found.contributions.append(join(sent, shape))
        found.states.append(tuple(join(each, shape) for each in zip(*states, strict=True)))
        begin += len(counts)
    return found


def merge_results(parts: Iterable[tuple[Sequence[int], ReduceResult]], count: int) -> ReduceResult:
    """Joins values that were reduced in parts."""
    found = ReduceResult([None] * count, [None] * count, [()] * count)
    for places, reduced in parts:
        for each, into in zip(reduced, found, strict=True):
            for place, value in zip(places, each, strict=True):
                into[place] = value
    return found
