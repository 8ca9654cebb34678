"""A training's hyperparameters for TensorBoard's HParams plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import summary as summary_lib


def session_start(hparams: Mapping[str, Any]) -> tf.compat.v1.Summary:
    """Returns the summary with which a training begins.

    Args:
        hparams: Names to values. A group within them becomes `group.name`.
    """
    return summary_lib.session_start_pb(dict(_flatten(hparams, "")))


def session_end() -> tf.compat.v1.Summary:
    """Returns the summary with which a training ends that has reached its end."""
    return summary_lib.session_end_pb(api_pb2.STATUS_SUCCESS)


def _flatten(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}{name}.")
        # TensorBoard answers in JSON, which has no infinite numbers.
        elif isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and abs(value) <= sys.float_info.max):
            yield f"{path}{name}", value
        else:
            yield f"{path}{name}", str(value)
