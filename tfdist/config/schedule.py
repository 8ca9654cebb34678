"""`ScheduleConfig`: the schedule of the learning rate. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfdist.config.constraints import MOST_STEPS, between, checked, choice, option, parsed
from tfdist.errors import ConfigError, format_value

SCALINGS = ("none", "linear", "sqrt")
_UPDATES = between(0, MOST_STEPS, off=True)
_FACTOR, _is_factor = between(0, 1e3)
_WARM_UP = ("name", "warmup_steps", "warmup_epochs")
_TAKES = {
    "constant": _WARM_UP,
    "cosine": (*_WARM_UP, "decay_steps", "end"),
    "step": (*_WARM_UP, "boundaries", "factor"),
    "polynomial": (*_WARM_UP, "decay_steps", "end", "power"),
}


def _numbers(where: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise ConfigError(f"{where} must be numbers, comma separated. Received: {format_value(text)}.") from None


def _boundary_faults(where: str, text: str) -> Iterator[str]:
    try:
        boundaries = _numbers(where, text)
    except ConfigError as e:
        yield from e.faults
        return
    rises = boundaries == sorted(set(boundaries)) and all(boundary > 0 for boundary in boundaries)
    if not rises or len({boundary < 1 for boundary in boundaries}) > 1:
        yield (
            f"{where} must be numbers above 0 that rise, either all numbers of updates or all shares of the run. "
            f"Received: {format_value(text)}."
        )
    elif any(boundary >= 1 and boundary % 1 for boundary in boundaries):
        yield f"{where} must be whole numbers, or shares below 1. Received: {format_value(text)}."
    elif boundaries and boundaries[-1] > MOST_STEPS:
        yield f"{where} must be at most {MOST_STEPS}. Received: {format_value(text)}."


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

    name: str = choice("constant", *_TAKES)
    warmup_steps: int = option(0, *_UPDATES)
    warmup_epochs: float = option(0.0, *_UPDATES)
    decay_steps: int = option(0, *_UPDATES)
    end: float = option(0.0, "0 to 1, a share of learning_rate", lambda end: 0 <= end <= 1)
    power: float = option(1.0, *between(1e-3, 1e3))
    boundaries: str = checked("", _boundary_faults)
    factor: str = parsed("0.1", _numbers)

    def faults(self) -> Iterator[str]:
        """Yields the errors of fields that do not go together."""
        if self.name not in _TAKES:  # the field's own error
            return
        if self.warmup_steps and self.warmup_epochs:
            yield (
                "Only one of schedule.warmup_steps and schedule.warmup_epochs may be set. "
                f"Received: {self.warmup_steps} and {self.warmup_epochs}."
            )
        if self.name == "step" and not self.boundaries.strip(", "):
            yield (
                "schedule 'step' needs schedule.boundaries, such as 3000,6000 updates or 0.5,0.75 of the run. "
                f"Received: {format_value(self.boundaries)}."
            )
        known = _TAKES[self.name]
        for field in dataclasses.fields(self):
            if field.name not in known and getattr(self, field.name) != field.default:
                yield f"schedule {self.name!r} takes no {field.name!r}. It takes: {', '.join(known[1:])}."
        try:
            factors = self.factors()
            boundaries = self.numbers("boundaries")
        except ConfigError:  # the fields' own errors
            return
        if len(factors) != len(boundaries) or not all(map(_is_factor, factors)):
            yield (
                f"schedule.factor must be one number of {_FACTOR}, or one for each of schedule.boundaries "
                f"({len(boundaries)}). Received: {format_value(self.factor)}."
            )

    def numbers(self, field: str) -> list[float]:
        """Returns the numbers in `boundaries` or `factor`. Raises ConfigError if the text does not consist of numbers."""
        return _numbers(f"schedule.{field}", getattr(self, field))

    def factors(self) -> list[float]:
        """Returns the factor of each boundary."""
        numbers = self.numbers("factor")
        if len(numbers) == 1:
            numbers *= len(self.numbers("boundaries"))
        return numbers
