"""`ScheduleConfig`: the schedule of the learning rate. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfdist.config.ranges import MOST_STEPS, Range
from tfdist.errors import ConfigError, format_value, unknown_name_message

SCHEDULES = ("constant", "cosine", "step", "polynomial")
SCALINGS = ("none", "linear", "sqrt")
_RANGES = {
    **dict.fromkeys(("warmup_steps", "warmup_epochs", "decay_steps"), Range(0, MOST_STEPS, off=True)),
    "power": Range(1e-3, 1e3),
}
_FACTOR = Range(0, 1e3)


@dataclasses.dataclass
class ScheduleConfig:
    """The schedule of the learning rate. It counts updates: with `gradient_accumulation_steps`, one update takes several steps.

    Attributes:
        name: `"constant"`; `"cosine"`; `"step"`, which falls at `boundaries`; or `"polynomial"`, of `power`.
        warmup_steps: Updates in which the rate rises linearly from 0 to `learning_rate`, before the schedule; 0 means no warm-up.
        warmup_epochs: The length of the warm-up in epochs, in place of `warmup_steps`.
        decay_steps: Updates after the warm-up in which `cosine` and `polynomial` fall; 0 means until the end of the run.
        end: The final rate of `cosine` and `polynomial`, as a share of `learning_rate`.
        power: The exponent of `polynomial`; 1 is a straight line.
        boundaries: For `step`: the updates of the run, warm-up included, after which the rate falls, as `3000,6000`. Numbers
            below 1 are shares of the run, as `0.5,0.75`.
        factor: For `step`: the multiplier of the rate at each boundary: one number, or one per boundary, such as `0.1,0.5`.

    Examples:
        >>> from tfdist.config import ScheduleConfig
        >>> ScheduleConfig("cosine", warmup_steps=100).warmup_steps
        100
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    decay_steps: int = 0
    end: float = 0.0
    power: float = 1.0
    boundaries: str = ""
    factor: str = "0.1"

    def faults(self) -> Iterator[str]:
        """Yields the errors in the values."""
        if self.name not in SCHEDULES:
            yield unknown_name_message("schedule.name", self.name, SCHEDULES)
            return
        for name, allowed in _RANGES.items():
            yield from allowed.faults(f"schedule.{name}", getattr(self, name))
        if self.warmup_steps and self.warmup_epochs:
            yield (
                "Only one of schedule.warmup_steps and schedule.warmup_epochs may be set. "
                f"Received: {self.warmup_steps} and {self.warmup_epochs}."
            )
        if not 0 <= self.end <= 1:
            yield f"schedule.end must be 0 to 1, a share of learning_rate. Received: {self.end}."
        if self.name == "step" and not self.boundaries.strip(", "):
            yield (
                "schedule 'step' needs schedule.boundaries, such as 3000,6000 updates or 0.5,0.75 of the run. "
                f"Received: {format_value(self.boundaries)}."
            )
        takes: dict[str, tuple[str, ...]] = {"cosine": ("decay_steps", "end"), "step": ("boundaries", "factor")}
        takes |= {"polynomial": ("decay_steps", "end", "power")}
        for field in dataclasses.fields(self):
            known = ("name", "warmup_steps", "warmup_epochs", *takes.get(self.name, ()))
            if field.name not in known and getattr(self, field.name) != field.default:
                yield f"schedule {self.name!r} takes no {field.name!r}. It takes: {', '.join(known[1:])}."
        try:
            boundaries, factors = self.numbers("boundaries"), self.factors()
        except ConfigError as e:
            yield from e.faults
            return
        shares = [boundary < 1 for boundary in boundaries]
        if (
            boundaries != sorted(set(boundaries))
            or not all(boundary > 0 for boundary in boundaries)
            or (any(shares) and not all(shares))
        ):
            yield (
                "schedule.boundaries must be numbers above 0 that rise, either all numbers of updates or all shares of the run. "
                f"Received: {format_value(self.boundaries)}."
            )
        elif any(boundary >= 1 and boundary % 1 for boundary in boundaries):
            yield f"schedule.boundaries must be whole numbers, or shares below 1. Received: {format_value(self.boundaries)}."
        elif boundaries and boundaries[-1] > MOST_STEPS:
            yield f"schedule.boundaries must be at most {MOST_STEPS}. Received: {format_value(self.boundaries)}."
        if len(factors) != len(boundaries) or not all(factor in _FACTOR for factor in factors):
            yield (
                f"schedule.factor must be one number of {_FACTOR}, or one for each of schedule.boundaries "
                f"({len(boundaries)}). Received: {format_value(self.factor)}."
            )

    def numbers(self, field: str) -> list[float]:
        """Returns the numbers of a text.

        Args:
            field: `boundaries` or `factor`.

        Raises:
            ConfigError: The text does not consist of numbers.
        """
        text = getattr(self, field)
        try:
            return [float(number) for number in text.split(",") if number.strip()]
        except ValueError:
            raise ConfigError(
                f"schedule.{field} must be numbers, comma separated. Received: {format_value(text)}."
            ) from None

    def factors(self) -> list[float]:
        """Returns the factor of each boundary."""
        numbers = self.numbers("factor")
        return numbers * len(self.numbers("boundaries")) if len(numbers) == 1 else numbers
