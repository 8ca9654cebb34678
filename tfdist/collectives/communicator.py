"""Carries out what exchanges ask for.

All replicas of this process go through their exchanges in lockstep, so that no collective waits for another one. Between processes
TensorFlow's collectives do the work (`cross_process.py`); between the replicas of one process, ordinary operations (`in_process.py`).
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.collectives.requests import AllGather, AllReduce, Cond, RankContext

Result = TypeVar("Result")


class Communicator(abc.ABC):
    """The ranks that exchange something, of which some are this process's.

    Args:
        ranks: The numbers of this process's.
        size: The number of all.
    """

    def __init__(self, ranks: Sequence[int], size: int):
        self.ranks = list(ranks)
        self.size = size
        self._lane = 0

    def contexts(self, step: tf.Tensor) -> list[RankContext]:
        """Returns the members that are this process's."""
        return [RankContext(rank, self.size, step) for rank in self.ranks]

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        """Runs the exchanges of this process's ranks to their ends, and returns their results.

        Args:
            exchanges: Of each rank.
            lane: Those of different lanes do not wait for each other, but for every sixteenth.
        """
        before, self._lane = self._lane, lane
        answers: list[Any] = [None] * len(exchanges)
        while True:
            asked, results = [], []
            for exchange, answer in zip(exchanges, answers, strict=True):
                try:
                    asked.append(exchange.send(answer))
                except StopIteration as e:
                    results.append(e.value)
            if results:
                self._lane = before
                return results
            answers = self._answer(asked)

    def _answer(self, asked: list[Any]) -> list[Any]:
        first = asked[0]
        if isinstance(first, Cond):
            return tf.cond(
                first.condition,
                lambda: self.run([request.if_true() for request in asked], self._lane),
                lambda: self.run([request.if_false() for request in asked], self._lane),
            )
        if isinstance(first, AllReduce):
            return self._all_reduce([request.tensors for request in asked], first.largest)
        move = self._all_gather if isinstance(first, AllGather) else self._all_to_all
        return move([request.tensor for request in asked])

    @abc.abstractmethod
    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows of all ranks, for each of this process's; each has as many, but perhaps others from step to step."""

    @abc.abstractmethod
    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        """Returns the rows of all ranks, for each of this process's; how many each has may differ, and from step to step."""

    @abc.abstractmethod
    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]: ...

    @abc.abstractmethod
    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]: ...

    @abc.abstractmethod
    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]: ...
