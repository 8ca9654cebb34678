"""Learning rate schedules. Model files store them as schedules that Keras itself can load.

Keras gives a schedule the number of steps, not of updates: with `gradient_accumulation_steps=n`, update `u` (from 0 on) comes at
step `u * n + n - 1`. The schedules here count such steps, so that a model file has the same meaning without tfdist.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.config.schedule import ScheduleConfig
from tfdist.errors import ConfigError
from tfdist.runtime.log import logger


@keras.saving.register_keras_serializable(package="tfdist")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up that continues as another Keras schedule. `CosineDecay` has its own warm-up.

    Files that a Trainer saves contain `after` instead, which plain Keras loads; both are equal after the warm-up. To load other
    files with a `WarmUp`, import this module first.

    Args:
        after: The schedule after the warm-up; it counts steps from the beginning of the warm-up.
        warmup_steps: Steps in which the rate rises.
        warmup_target: The rate that it rises to.
        initial_learning_rate: The rate that it rises from.
    """

    def __init__(
        self,
        after: keras.optimizers.schedules.LearningRateSchedule,
        warmup_steps: int,
        warmup_target: float,
        initial_learning_rate: float = 0.0,
    ):
        self.after = after
        self.warmup_steps = warmup_steps
        self.warmup_target = warmup_target
        self.initial_learning_rate = initial_learning_rate

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        after = self.after(step)
        share = keras.ops.cast(step, after.dtype) / self.warmup_steps
        rising = self.initial_learning_rate + (self.warmup_target - self.initial_learning_rate) * share
        return keras.ops.where(share < 1, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "after": keras.optimizers.schedules.serialize(self.after),
            "warmup_steps": self.warmup_steps,
            "warmup_target": self.warmup_target,
            "initial_learning_rate": self.initial_learning_rate,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """Returns the schedule of a `get_config`."""
        return cls(**{**config, "after": keras.optimizers.schedules.deserialize(config["after"])})


def build_schedule(
    config: ScheduleConfig,
    learning_rate: float,
    steps_per_epoch: int | None = None,
    epochs: int = 1,
    accumulation: int = 1,
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Returns the schedule of `config`, or the learning rate itself if it is constant.

    The schedule begins with `learning_rate`, after the warm-up. `accumulation` is the number of steps whose mean gradient makes one update.

    Raises:
        ConfigError: The schedule needs the number of steps, which is unknown; or the warm-up takes all updates of the run.
    """
    n = accumulation
    total = steps_per_epoch * epochs // n if steps_per_epoch else None  # updates
    boundaries = config.numbers("boundaries")
    decays_until_end = config.name in ("cosine", "polynomial") and not config.decay_steps
    has_shares = min(boundaries, default=1) < 1
    if total is None and (config.warmup_epochs or decays_until_end or has_shares):
        raise ConfigError(
            f"schedule {config.name!r} depends on the steps of the run, and the task does not say how many an epoch has: set "
            "steps_per_epoch, or count updates: schedule.decay_steps, schedule.warmup_steps, and boundaries from 1 on."
        )
    warmup = config.warmup_steps or round(config.warmup_epochs * (steps_per_epoch or 0) / n)
    if total and warmup > total and (config.name in ("constant", "step") or config.decay_steps):
        logger.warning(
            f"the warm-up of {warmup} updates is longer than the run of {total}: the learning rate does not reach {learning_rate:g}; "
            "make schedule.warmup_steps or warmup_epochs smaller."
        )
    if total and config.name == "step" and boundaries[-1] > total:
        logger.warning(
            f"schedule.boundaries has {boundaries[-1]:g}, which is after the run's {total} updates: the learning rate does not fall there; "
            "make it smaller, or a share of the run."
        )

    def at(update: int) -> int:
        return update * n + n - 1

    begins = at(warmup)  # the step of the first update after the warm-up
    rises: dict[str, Any] = {
        "warmup_steps": begins,
        "warmup_target": learning_rate,
        "initial_learning_rate": learning_rate,
    }
    if warmup:  # such that the first update, at step n - 1, has rate 0
        rises["initial_learning_rate"] = -learning_rate * (n - 1) / (warmup * n)
    if config.name == "constant":
        if not warmup:
            return learning_rate
        # A cosine without decay, because only Keras' CosineDecay has a warm-up.
        return keras.optimizers.schedules.CosineDecay(decay_steps=1, alpha=1.0, **rises)
    if config.name == "step":
        # A boundary below 1 is a share of the run.
        ends = [round(boundary * (total or 0)) if boundary < 1 else int(boundary) for boundary in boundaries]
        rates = [learning_rate]
        for factor in config.factors():
            rates.append(rates[-1] * factor)
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([at(end) - 1 for end in ends], rates)
        return WarmUp(schedule, **rises) if warmup else schedule
    decay = config.decay_steps or (total or 0) - warmup
    if decay <= 0:
        raise ConfigError(
            f"The warm-up of {warmup} updates leaves none of the run's {total} for schedule {config.name!r}: make schedule.warmup_steps "
            "or warmup_epochs smaller, or set schedule.decay_steps."
        )
    if config.name == "cosine":
        if not begins:
            return keras.optimizers.schedules.CosineDecay(learning_rate, decay, alpha=config.end)
        return keras.optimizers.schedules.CosineDecay(decay_steps=decay * n, alpha=config.end, **rises)
    # Keras' polynomial starts at step 0: make it longer, so that it has the learning rate at the end of the warm-up.
    end = learning_rate * config.end
    steps = decay * n + begins
    first = end + (learning_rate - end) * (steps / (decay * n)) ** config.power
    schedule = keras.optimizers.schedules.PolynomialDecay(first, steps, end, config.power)
    return WarmUp(schedule, **rises) if warmup else schedule
