"""The protocol between compressors, which only compute, and communicators, which move bytes.

An exchange is a generator: it yields a request, receives the answer through `send`, and returns the sums over all ranks. A
`Communicator` (`collectives/communicator.py`) executes the requests. So the same exchange runs between processes, between the
devices of one process, in a simulation, and in a count of its bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Requests the sums (if `largest`, the maxima) of tensors over all ranks; tensors of one dtype share a message."""

    tensors: Sequence[tf.Tensor]
    largest: bool = False


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Requests the tensors of all ranks, stacked to `[size, *shape]`. All have the same shape; int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Sends row i of a `[size, ...]` tensor to rank i; requests the row that each rank sends to this one. int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Cond:
    """Requests the result of one of two exchanges. The condition is a scalar bool, equal on all ranks."""

    condition: tf.Tensor
    if_true: Callable[[], Exchange]
    if_false: Callable[[], Exchange]


class ReduceResult(NamedTuple):
    """The result of an exchange.

    Attributes:
        sums: The sum of each value over all ranks, without the part lost in compression; bit-identical on all ranks.
        contributions: This rank's part of each sum, as transmitted: the contributions of all ranks add up to the sums.
        states: The compressor's new state for each value.
    """

    sums: list[tf.Tensor]
    contributions: list[tf.Tensor]
    states: list[tuple[tf.Tensor, ...]]


Exchange = Generator[Any, Any, ReduceResult]


@dataclasses.dataclass(frozen=True)
class RankContext:
    """The rank that runs an exchange, and the step.

    Attributes:
        rank: The rank, from 0.
        size: The number of ranks.
        step: The number of updates so far, a scalar int64. Equal on all ranks, so that it can seed random numbers.
    """

    rank: int
    size: int
    step: tf.Tensor


def fuse(exchanges: Sequence[Exchange]) -> Generator[Any, Any, list[ReduceResult]]:
    """Fuses several exchanges into one, which runs them in rounds and merges their sums of a round into one `AllReduce`.

    The other requests of a round are yielded one by one.
    """
    results: list[Any] = [None] * len(exchanges)
    pending: dict[int, Any] = {}  # index of an exchange -> its unanswered request

    def advance(index: int, answer: Any) -> None:
        try:
            pending[index] = exchanges[index].send(answer)
        except StopIteration as e:
            pending.pop(index, None)
            results[index] = e.value

    for index in range(len(exchanges)):
        advance(index, None)
    while pending:
        # All ranks run the same exchanges, so all of them yield the requests of a round in this order.
        sums = {i: request for i, request in pending.items() if isinstance(request, AllReduce) and not request.largest}
        others = {i: request for i, request in pending.items() if i not in sums}
        answers: dict[int, Any] = {}
        if sums:
            totals = iter((yield AllReduce([tensor for request in sums.values() for tensor in request.tensors])))
            answers |= {i: [next(totals) for _ in request.tensors] for i, request in sums.items()}
        for i, request in others.items():
            answers[i] = yield request
        for i in sorted(answers):
            advance(i, answers[i])
    return results


def flatten(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the elements of all values, concatenated to one vector."""
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def unflatten(vector: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits a vector into tensors of the shapes of `values`: the inverse of `flatten`."""
    parts = tf.split(vector, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]
