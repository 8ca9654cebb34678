"""The protocol between compressors, which only compute, and communicators, which move bytes.

An exchange is a generator. It yields requests, receives the answers by `send`, and returns a `ReduceResult`. A `Communicator`
(`collectives/communicator.py`) executes the requests. So the same exchange runs in several processes, on several devices of one process,
in a simulation in a test, and in a count of the bytes that would be sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Requests the sums (or maxima, if `largest`) of tensors over all ranks, in one message per dtype."""

    tensors: Sequence[tf.Tensor]
    largest: bool = False


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Requests the tensors of all ranks, stacked to `[size, *shape]`. All ranks have the same shape. int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Sends row i of `[size, ...]` to rank i; requests the rows that all ranks send to this rank. int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Cond:
    """Requests the result of one of two exchanges. `condition` is a scalar bool, the same on all ranks."""

    condition: tf.Tensor
    if_true: Callable[[], Exchange]
    if_false: Callable[[], Exchange]


class ReduceResult(NamedTuple):
    """The result of an exchange.

    Attributes:
        sums: For each value, the sum over all ranks of what was transmitted; bitwise equal on all ranks.
        contributions: For each value, this rank's part of the sum; the contributions of all ranks add up to `sums`.
        states: The new state of each value.
    """

    sums: list[tf.Tensor]
    contributions: list[tf.Tensor]
    states: list[tuple[tf.Tensor, ...]]


Exchange = Generator[Any, Any, ReduceResult]


@dataclasses.dataclass(frozen=True)
class RankContext:
    """A rank's place in an exchange.

    Attributes:
        rank: The rank.
        size: The number of ranks.
        step: The number of updates so far, a scalar int64. It is the same on all ranks, so that it can seed random numbers.
    """

    rank: int
    size: int
    step: tf.Tensor


def fuse(exchanges: Sequence[Exchange]) -> Generator[Any, Any, list[ReduceResult]]:
    """Fuses several exchanges into one; the sums that they request in the same round become one request."""
    results: list[Any] = [None] * len(exchanges)
    asked: dict[int, Any] = {}

    def go_on(number: int, answer: Any) -> None:
        try:
            asked[number] = exchanges[number].send(answer)
        except StopIteration as e:
            asked.pop(number, None)
            results[number] = e.value

    for number in range(len(exchanges)):
        go_on(number, None)
    while asked:
        sums = {n: request for n, request in asked.items() if isinstance(request, AllReduce) and not request.largest}
        others = {n: request for n, request in asked.items() if n not in sums}
        answers: dict[int, Any] = {}
        if sums:
            flat = iter((yield AllReduce([tensor for request in sums.values() for tensor in request.tensors])))
            answers |= {n: [next(flat) for _ in request.tensors] for n, request in sums.items()}
        for n, request in others.items():
            answers[n] = yield request
        for n in sorted(answers):
            go_on(n, answers[n])
    return results


def flatten(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns one flat tensor with the elements of all `values`."""
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def unflatten(numbers: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits a flat tensor into tensors of the shapes of `values`: the inverse of `flatten`."""
    parts = tf.split(numbers, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]
