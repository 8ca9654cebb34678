"""`ExportConfig`: the models that a run exports for TensorFlow Serving. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tfdist.config.backup import folder_faults
from tfdist.config.constraints import checked, choice
from tfdist.errors import ConfigError, collect_errors, format_value, unknown_name_message

MODES = ("auto", "min", "max")
_FALL = ("loss", "error", "mse", "rmse", "mae", "mape", "msle", "crossentropy", "perplexity", "divergence")
_RISE = ("accuracy", "acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "similarity")


@dataclasses.dataclass
class ExportConfig:
    """The models that a run exports for TensorFlow Serving, besides `model.keras`; see `tfdist.ExportBest`.

    Attributes:
        best: The metric by which the best model is exported whenever it improves, such as `val_loss`; empty means none.
        mode: Whether a smaller (`min`) or larger (`max`) value of the metric is better; `auto` infers it from the metric's name.
        final: Whether the model at the end of the training is exported.
        dir: The folder; models go to `best/NUMBER` and `final/NUMBER` in it. Empty means `export` in the work directory.

    Examples:
        >>> from tfdist.config import ExportConfig
        >>> ExportConfig(best="val_loss").best
        'val_loss'
    """

    best: str = ""
    mode: str = choice("auto", *MODES)
    final: bool = False
    dir: str = checked("", folder_faults)

    def faults(self) -> Iterator[str]:
        """Yields the error of a metric whose better values `mode` does not tell."""
        if self.best and self.mode == "auto":
            faults: list[str] = []
            with collect_errors(faults):
                rises("export.best", self.best, "export.mode", self.mode)
            yield from faults


def rises(field: str, metric: str, mode_field: str, mode: str) -> bool:
    """Returns whether a larger value of a metric is the better one. `field` and `mode_field` are the options' names, for the error.

    Raises:
        ConfigError: The mode is unknown, or `auto` cannot infer it from the metric's name.
    """
    if mode not in MODES:
        raise ConfigError(unknown_name_message(mode_field, mode, MODES))
    words = set(re.split("[^a-z0-9]+", metric.lower()))
    if mode != "auto":
        return mode == "max"
    falls = not words.isdisjoint(_FALL)
    rises = not words.isdisjoint(_RISE)
    if falls == rises:
        raise ConfigError(
            f"{mode_field} 'auto' cannot tell whether {field} shall fall or rise; set it to 'min' or 'max'. "
            f"Received: {format_value(metric)}."
        )
    return rises
