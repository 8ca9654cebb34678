"""The protocol between compressors, which only compute, and communicators, which move bytes.

An exchange is a generator. It yields a request, is sent the answer, and returns the sums over all ranks. Who carries it out is
another's business (`collectives/communicator.py`): so one piece of code serves several processes, several devices of one process, a simulation
in a test, and a count of the bytes that would be sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Asks for the sums (or maxima) over all ranks of some tensors, in as few messages as there are types of numbers."""

    tensors: Sequence[tf.Tensor]
    largest: bool = False


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Asks for `[size, *shape]`, the tensors of all ranks, which have the same shape. int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Gives row i of `[size, ...]` to rank i; asks for the rows of all ranks for this one. int32 or float32."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Cond:
    """Asks for the result of one of two exchanges. All ranks have the same condition, a scalar bool."""

    condition: tf.Tensor
    if_true: Callable[[], Exchange]
    if_false: Callable[[], Exchange]


class ReduceResult(NamedTuple):
    """The result of an exchange.

    Attributes:
        sums: The sum over all ranks as far as it came through, for each value; the same to the bit on all ranks.
        contributions: This rank's contribution: over all ranks these add up to the sums.
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
        rank: Its number.
        size: The number of ranks.
        step: How many updates there have been, a scalar int64: the same on all ranks, so that it can seed random numbers.
    """

    rank: int
    size: int
    step: tf.Tensor


def fuse(exchanges: Sequence[Exchange]) -> Generator[Any, Any, list[ReduceResult]]:
    """Fuses several exchanges into one: sums of the same round travel in one message."""
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
    """Returns all values' numbers, one after another."""
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def unflatten(numbers: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns numbers in the shapes of values: the inverse of `flatten`."""
    parts = tf.split(numbers, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]
