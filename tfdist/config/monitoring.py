"""`MonitoringConfig`: the TensorBoard output and the tracker of a run. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tfdist.config import registry
from tfdist.config.constraints import matches, option, parsed
from tfdist.errors import ConfigError, format_value, unknown_name_message

# Each is also the name of the package that it needs.
TRACKERS = {
    "mlflow": "tfdist.monitoring.tracker:MLflow",
    "trackio": "tfdist.monitoring.tracker:Trackio",
    "wandb": "tfdist.monitoring.tracker:WandB",
}
_NUMBER = "[1-9][0-9]{0,14}"
_UPDATE_FREQ = matches("a number of steps from 1, 'batch' or 'epoch'", f"batch|epoch|{_NUMBER}")


def step_range(name: str, text: str) -> tuple[int, int] | None:
    """Returns the first and the last step of a range such as `20:25`, or of one step; None for an empty text.

    `name` is the field, for the error. Raises ConfigError if the text is not a range of steps.
    """
    if text == "":
        return None
    match = re.fullmatch(f"({_NUMBER})(?::({_NUMBER}))?", str(text))
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise ConfigError(
            f"{name} must be the first and the last step, such as '20:25', or one step from 1. Received: {format_value(text)}."
        )
    return int(match[1]), int(match[2] or match[1])


def check_tracker(name: str, text: str) -> None:
    """Raises ConfigError if a tracker is unknown. `name` is the field, for the error."""
    if isinstance(text, str) and ":" in text:
        registry.check_findable("tracker", text)
    elif text not in ("", *TRACKERS):
        raise ConfigError(unknown_name_message(name, text, [*TRACKERS, "package.module:Class"]))


@dataclasses.dataclass
class MonitoringConfig:
    """The curves and profiles that a run writes for TensorBoard, and its tracker; see `tfdist.monitoring.TensorBoard` and `Tracker`.

    Attributes:
        update_freq: Number of steps between two values of the curves by step; `"batch"` means 1, `"epoch"` means no curves by step.
        profile_steps: The steps to profile: first and last as `"20:25"`, or one step; empty means no profile.
        tracker: The tracker that records the configuration and each epoch's metrics: `"mlflow"`, `"wandb"`, `"trackio"` or
            `"package.module:Class"`; empty means none.

    Examples:
        >>> from tfdist.config import MonitoringConfig
        >>> MonitoringConfig(profile_steps="20:25").profile_steps
        '20:25'
    """

    update_freq: str = option("10", *_UPDATE_FREQ)
    profile_steps: str = parsed("", step_range)
    tracker: str = parsed("", check_tracker)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `TensorBoard`."""
        arguments: dict[str, Any] = {"update_freq": self.update_freq, "profile_steps": self.profile_steps}
        if self.update_freq.isdecimal():
            arguments["update_freq"] = int(self.update_freq)
        return arguments
