"""`MonitoringConfig`: the TensorBoard output of a run. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tfdist.errors import ConfigError, format_value

_NUMBER = "[1-9][0-9]{0,14}"


@dataclasses.dataclass
class MonitoringConfig:
    """The curves and profiles that a run writes for TensorBoard; see `tfdist.monitoring.TensorBoard`.

    Attributes:
        update_freq: Number of steps between two values of the curves by step; `"batch"` means 1, `"epoch"` means no curves by step.
        profile_steps: The steps to profile: first and last as `"20:25"`, or one step; empty means no profile.

    Examples:
        >>> from tfdist.config import MonitoringConfig
        >>> MonitoringConfig(profile_steps="20:25").profile_steps
        '20:25'
    """

    update_freq: str = "10"
    profile_steps: str = ""

    def faults(self) -> Iterator[str]:
        """Yields the errors in the values."""
        if self.update_freq not in ("batch", "epoch") and not re.fullmatch(_NUMBER, self.update_freq):
            yield (
                "monitoring.update_freq must be a number of steps from 1, 'batch' or 'epoch'. "
                f"Received: {format_value(self.update_freq)}."
            )
        try:
            step_range("monitoring.profile_steps", self.profile_steps)
        except ConfigError as e:
            yield from e.faults

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `TensorBoard`."""
        freq = int(self.update_freq) if self.update_freq.isdecimal() else self.update_freq
        return {"update_freq": freq, "profile_steps": self.profile_steps}


def step_range(name: str, text: str) -> tuple[int, int] | None:
    """Returns the first and the last step of a range such as `20:25`, or of one step; None for an empty text.

    Args:
        name: The field, for the error.
        text: The range.

    Raises:
        ConfigError: The text is not a range of steps.
    """
    if text == "":
        return None
    match = re.fullmatch(f"({_NUMBER})(?::({_NUMBER}))?", str(text))
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(
            f"{name} must be the first and the last step, such as '20:25', or one step from 1. Received: {format_value(text)}."
        )
    return first, last
