"""Choices between the executions of a training by measured seconds, which all ranks make alike: the shares of a batch, and the compressor."""

from __future__ import annotations

import abc
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import keras

from tfdist.aliases import Json
from tfdist.collectives.ranks import ranks_of
from tfdist.compat import optimizer_search, tf_internals
from tfdist.compression.candidates import UNDECIDED, least_lossy, short_name, worth_trying
from tfdist.config.strategy import SHARES_NEED_A_CLOCK
from tfdist.errors import ConfigError
from tfdist.gradients.optimizer import get_reduction
from tfdist.gradients.reduction import Reduction
from tfdist.replicas.batch_shares import EVEN
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_TRIAL_STEPS = 8
_WINDOW_STEPS = 200
_DRIFT = 0.3
_MOST_ROUNDS = 5
_BALANCED = 1.05  # the slowest worker's own time over the mean
_LEAST_SHARE = EVEN // 8

_Result = TypeVar("_Result")
# Yields once for each execution, and receives its seconds and its number of steps.
_Executions = Generator[None, tuple[float, int], _Result]


def measured_choices(model: keras.Model) -> list[MeasuredChoice]:
    """Returns what is measured while a model trains, in this order. Its optimizers must be built."""
    strategy: Strategy = model.distribute_strategy
    choices: list[MeasuredChoice] = []
    if strategy.batch_shares:
        choices.append(ShareSelection(strategy))
    reductions = filter(None, map(get_reduction, optimizer_search.optimizers(model)))
    measured = [each for each in reductions if each.selection is not None or each.fidelity is not None]
    if measured:
        choices.append(CodecSelection(strategy, measured))
    return choices


class MeasuredChoice(abc.ABC):
    """A choice that is measured in real steps, stands until their time drifts, and is stored in backups.

    Attributes:
        ranks: The tasks that train together.
    """

    def __init__(self, strategy: Strategy):
        self.ranks = ranks_of(strategy)
        self._state: Any = None
        self._executions: _Executions[None]

    @property
    @abc.abstractmethod
    def state(self) -> Any:
        """The choice as backups have it."""

    @property
    @abc.abstractmethod
    def is_settled(self) -> bool:
        """True while the choice stands, until a drift; else it is being measured."""

    @abc.abstractmethod
    def choose(self) -> _Executions[None]:
        """Measures, and settles the choice."""

    @abc.abstractmethod
    def has_drifted(self, usual: list[float], now: list[float]) -> bool:
        """Returns whether to choose again, by each rank's seconds of a step in the first window after the choice and in the last one."""

    def begin(self) -> bool:
        """Prepares an execution; returns whether the step must be traced again."""
        # Measuring begins only here, because a backup may have been restored since the last execution.
        if self.state != self._state:
            self._state = self.state
            self._executions = self._measuring()
            next(self._executions)
        return False

    def end(self, seconds: float, steps: int) -> None:
        """Decides after an execution of `steps` steps. A collective."""
        self._executions.send((seconds, steps))
        self._state = self.state

    def measure(
        self, steps: int, summary: Callable[[list[float]], float] = statistics.median
    ) -> _Executions[list[float]]:
        """Returns each rank's summary of the seconds of a step in the next executions, of at least `steps` steps together."""
        yield  # may trace or compile
        by_execution: list[float] = []
        while steps > 0:
            seconds, done = yield
            by_execution.append(seconds / done)
            steps -= done
        return self.ranks.gather(summary(by_execution))[:, 0].tolist()

    def _measuring(self) -> _Executions[None]:
        while True:
            if not self.is_settled:
                yield from self.choose()
            usual = now = yield from self.measure(_WINDOW_STEPS)
            while not self.has_drifted(usual, now):
                now = yield from self.measure(_WINDOW_STEPS)
            yield from self.choose()


class ShareSelection(MeasuredChoice):
    """The shares of the workers of a strategy. All workers compute them from the same gathered times."""

    def __init__(self, strategy: Strategy):
        if tf_internals.is_op_determinism_enabled():
            raise ConfigError(SHARES_NEED_A_CLOCK)
        super().__init__(strategy)
        self._shares = strategy.batch_shares
        self._own_time = strategy.own_time
        self._before = 0.0

    @property
    def state(self) -> Json:
        """The state of the `BatchShares`."""
        return self._shares.state()

    @property
    def is_settled(self) -> bool:
        """True while the shares stand."""
        return self._shares.is_settled

    def end(self, seconds: float, steps: int) -> None:
        """Decides after an execution, of which the worker's own seconds count."""
        now = float(self._own_time.seconds.numpy())
        super().end(now - self._before, steps)
        self._before = now

    def choose(self) -> _Executions[None]:
        """Gives each worker a share in proportion to its speed with the one before, until they are balanced."""
        shares = self._shares
        shares.is_settled = False
        tried: list[tuple[float, list[int]]] = []
        for _ in range(_MOST_ROUNDS):
            seconds = yield from self.measure(_TRIAL_STEPS)
            tried.append((max(seconds), shares.numbers))
            if max(seconds) <= _BALANCED * statistics.mean(seconds):
                break
            speeds = [number / each for number, each in zip(shares.numbers, seconds, strict=True)]
            unit = EVEN / statistics.mean(speeds)
            shares.assign([max(_LEAST_SHARE, round(unit * speed)) for speed in speeds])
        _, fastest = min(tried)  # not the last ones: what takes the time may not depend on the share
        shares.assign(fastest)
        shares.is_settled = True
        if self.ranks.is_chief:
            named = zip(self.ranks.names, shares.fractions, strict=True)
            listed = ", ".join(f"{name} {100 * each:.3g} %" for name, each in named)
            logger.info(f"batch shares by speed: {listed}")

    def has_drifted(self, usual: list[float], now: list[float]) -> bool:
        """Returns whether the slowest worker's own time is far above the mean."""
        return max(now) > (1 + _DRIFT) * statistics.mean(now)


class CodecSelection(MeasuredChoice):
    """The compressor of some reductions, which all use the same candidate. The chief's clock decides, and a new one needs a new trace."""

    def __init__(self, strategy: Strategy, reductions: Sequence[Reduction]):
        super().__init__(strategy)
        self._reductions = reductions
        self._traced = 0
        self._checked = [each.measures.step for each in reductions]
        self._has_warned = False
        self._is_alone = not strategy.traits.several_processes or self.ranks.size == 1
        if self._is_alone and reductions[0].selection is not None:
            logger.info("compression: auto chooses none, because all replicas are in one process")

    @property
    def state(self) -> tuple[int, int]:
        """The chosen candidate, or `UNDECIDED`, and the last one that may be chosen."""
        return (0, 0) if self._is_alone else self._reductions[0].stored_selection

    @property
    def is_settled(self) -> bool:
        """True if a candidate has been chosen."""
        return self.state[0] != UNDECIDED

    def begin(self) -> bool:
        """Prepares an execution; returns whether the step must be traced again."""
        if self.is_settled:  # a backup may have been restored
            for reduction in self._reductions:
                reduction.used = self.state[0]
        super().begin()
        used = self._reductions[0].used
        needs_trace = used != self._traced
        self._traced = used
        return needs_trace

    def end(self, seconds: float, steps: int) -> None:
        """Decides after an execution, by its time and by the guard's checks."""
        super().end(seconds, steps)
        for number, reduction in enumerate(self._reductions):
            measures = reduction.measures
            if measures.step in (0, self._checked[number]):
                continue
            self._checked[number] = measures.step
            broken = measures.broken_budget(bool(reduction.residuals))
            # The last digits of the measures may differ between unlike processors.
            if self.ranks.broadcast_scalar(bool(broken)):
                self._leave(reduction, measures.step, broken)

    def choose(self) -> _Executions[None]:
        """Tries the candidates that may save time, and chooses the least lossy of the fast ones."""
        last = self.state[1]
        self._select(UNDECIDED, last)
        seconds = {0: (yield from self._try(0))}
        measured = [sum(each.candidate_seconds(index) for each in self._reductions) for index in range(last + 1)]
        exchange_seconds = self.ranks.gather(*measured)[0].tolist()
        for index in worth_trying(exchange_seconds, seconds[0])[1:]:
            seconds[index] = yield from self._try(index)
        choice = least_lossy(seconds)
        self._use(choice)
        self._select(choice, last)
        if self.ranks.is_chief:
            times = ", ".join(f"{self._name(index)} {1000 * each:.3g} ms" for index, each in seconds.items())
            logger.info(f"compression: {self._name(choice)}, the least lossy within 5 % of the fastest step: {times}")

    def has_drifted(self, usual: list[float], now: list[float]) -> bool:
        """Returns whether the chief's step takes another time, and another candidate may be chosen."""
        if self.state[1] == 0 or abs(now[0] / usual[0] - 1) <= _DRIFT:
            return False
        times = f"{1000 * now[0]:.3g} ms instead of {1000 * usual[0]:.3g} ms"
        logger.info(f"compression: a step takes {times}; the compressors are measured again")
        return True

    def _try(self, index: int) -> _Executions[float]:
        """Returns the chief's seconds of the fastest of some steps with a candidate."""
        self._use(index)
        # What else the machine does meanwhile can only make a step slower.
        return (yield from self.measure(_TRIAL_STEPS, min))[0]

    def _use(self, index: int) -> None:
        """Lets the next executions use a candidate, without the state of earlier steps."""
        for reduction in self._reductions:
            reduction.used = index
            reduction.reset()

    def _select(self, choice: int, last: int) -> None:
        """Stores `state`."""
        for reduction in self._reductions:
            reduction.assign(reduction.selection, (choice, last))

    def _leave(self, reduction: Reduction, step: float, broken: str) -> None:
        """Leaves a compressor that has broken its budget for the candidate before it; a single one is only reported."""
        choice = self.state[0]
        name = short_name(reduction.compressor)
        if choice > 0:
            if self.ranks.is_chief:
                logger.warning(f"compression: {name} -> {self._name(choice - 1)} at step {step:.0f}: {broken}")
            self._use(choice - 1)
            self._select(choice - 1, choice - 1)
        elif choice == 0 and not self._has_warned:
            self._has_warned = True
            if self.ranks.is_chief:
                logger.warning(f"compression: {name} loses too much at step {step:.0f}: {broken}")

    def _name(self, index: int) -> str:
        return short_name(self._reductions[0].candidates[index])
