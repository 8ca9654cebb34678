"""The choice of the workers' shares of a batch, by measured seconds between the executions of a training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from typing import Any

import keras

from tfdist.aliases import Json, Structure
from tfdist.collectives.ranks import ranks_of
from tfdist.compat import tf_internals
from tfdist.config import relations
from tfdist.feature import Feature, RunningStep
from tfdist.replicas import batch_splitting
from tfdist.replicas.batch_shares import EVEN, BatchShares
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_TRIAL_STEPS = 8
_WINDOW_STEPS = 200
_DRIFT = 0.3
_MOST_ROUNDS = 5
_BALANCED = 1.05  # the slowest worker's own time over the mean
_LEAST_SHARE = EVEN // 8

# Yields once for each execution, and receives its seconds and its number of steps.
_Executions = Generator[None, tuple[float, int], list[float]]


class SharesBySpeed(Feature):
    """`batch_shares="by_speed"`: the workers' shares of each batch, in proportion to their speed."""

    @classmethod
    def asks(cls, strategy: Strategy) -> bool:
        return strategy.config.batch_shares == "by_speed" and strategy.num_workers > 1

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        self.shares = strategy.batch_shares = BatchShares(strategy.num_workers)
        self._selection: ShareSelection | None = None

    def execute(self, execution: Any, run: Callable[[], Structure]) -> Structure:
        if not execution.trains:
            return run()
        self._selection = self._selection or ShareSelection(self.strategy)
        self._selection.begin()
        logs = run()
        self._selection.end(execution.done)
        return logs

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        if step.trains:
            batch_splitting.check_part_of_whole(step.data, self.strategy)
        run()

    def state(self) -> Json:
        return self.shares.state()

    def restore(self, state: Json) -> None:
        self.shares.restore(state)

    def summary(self, model: keras.Model, workers: int) -> dict[str, Any]:
        return {"batch_shares": [round(each, 4) for each in self.shares.fractions]}


class ShareSelection:
    """The shares of the workers of a strategy: measured in real steps, kept until the times drift, and stored in backups.

    All workers compute them from the same gathered times.
    """

    def __init__(self, strategy: Strategy):
        if tf_internals.is_op_determinism_enabled():
            relations.check(("batch_shares", "deterministic"))
        self._ranks = ranks_of(strategy)
        self._shares = strategy.batch_shares
        self._own_time = strategy.own_time
        self._before = 0.0
        self._state: Json = None
        self._executions: Generator[None, tuple[float, int], None]

    def begin(self) -> None:
        """Prepares an execution."""
        # Measuring begins only here, because a backup may have been restored since the last execution.
        if self._shares.state() != self._state:
            self._state = self._shares.state()
            self._executions = self._measuring()
            next(self._executions)

    def end(self, steps: int) -> None:
        """Decides after an execution of `steps` steps, of which the worker's own seconds count. A collective."""
        now = float(self._own_time.seconds.numpy())
        self._executions.send((now - self._before, steps))
        self._before = now
        self._state = self._shares.state()

    def _measuring(self) -> Generator[None, tuple[float, int], None]:
        while True:
            if self._shares.is_settled:
                seconds = yield from self._measure(_WINDOW_STEPS)
                if max(seconds) <= (1 + _DRIFT) * statistics.mean(seconds):
                    continue
            yield from self._choose()

    def _measure(self, steps: int) -> _Executions:
        """Returns each rank's median seconds of a step in the next executions, of at least `steps` steps together."""
        yield  # may trace or compile
        by_execution: list[float] = []
        while steps > 0:
            seconds, done = yield
            by_execution.append(seconds / done)
            steps -= done
        return self._ranks.gather(statistics.median(by_execution))[:, 0].tolist()

    def _choose(self) -> Generator[None, tuple[float, int], None]:
        """Gives each worker a share in proportion to its speed with the one before, until they are balanced."""
        shares = self._shares
        shares.is_settled = False
        tried: list[tuple[float, list[int]]] = []
        for _ in range(_MOST_ROUNDS):
            seconds = yield from self._measure(_TRIAL_STEPS)
            tried.append((max(seconds), shares.numbers))
            if max(seconds) <= _BALANCED * statistics.mean(seconds):
                break
            speeds = [number / each for number, each in zip(shares.numbers, seconds, strict=True)]
            unit = EVEN / statistics.mean(speeds)
            shares.assign([max(_LEAST_SHARE, round(unit * speed)) for speed in speeds])
        _, fastest = min(tried)  # not the last ones: what takes the time may not depend on the share
        shares.assign(fastest)
        shares.is_settled = True
        if self._ranks.is_chief:
            named = zip(self._ranks.names, shares.fractions, strict=True)
            listed = ", ".join(f"{name} {100 * each:.3g} %" for name, each in named)
            logger.info(f"batch shares by speed: {listed}")
