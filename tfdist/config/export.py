"""`ExportConfig`: the models that a run exports for TensorFlow Serving. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tfdist.config.backup import folder_faults
from tfdist.errors import ConfigError, format_value, unknown_name_message

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
    mode: str = "auto"
    final: bool = False
    dir: str = ""

    def faults(self) -> Iterator[str]:
        """Yields the errors in the values."""
        try:
            rises("export.best", self.best or "loss", "export.mode", self.mode)
        except ConfigError as e:
            yield from e.faults
        yield from folder_faults("export.dir", self.dir)


def rises(field: str, metric: str, mode_field: str, mode: str) -> bool:
    """Returns whether a larger value of a metric is the better one.

    Args:
        field: The option with the metric's name, for the error.
        metric: The metric's name.
        mode_field: The option with the mode, for the error.
        mode: One of `MODES`.

    Raises:
        ConfigError: The mode is unknown, or `auto` cannot infer it from the metric's name.
    """
    if mode not in MODES:
        raise ConfigError(unknown_name_message(mode_field, mode, MODES))
    words = set(re.split("[^a-z0-9]+", metric.lower()))
    falls, rises = (any(word in words for word in known) for known in (_FALL, _RISE))
    if mode == "auto" and falls == rises:
        raise ConfigError(
            f"{mode_field} 'auto' cannot tell whether {field} shall fall or rise; set it to 'min' or 'max'. "
            f"Received: {format_value(metric)}."
        )
    return rises if mode == "auto" else mode == "max"
