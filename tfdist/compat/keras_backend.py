"""A check, before Keras is imported, of the backend that Keras will run on."""

from __future__ import annotations

import json
import os
import pathlib
import sys

from tfdist.errors import ConfigError
from tfdist.runtime.files import read_file


def check() -> None:
    """Checks that Keras runs, or will run, on TensorFlow.

    Raises:
        ConfigError: Another backend is chosen; the message names the setting.
    """
    if "keras" in sys.modules and hasattr(sys.modules["keras"], "backend"):
        chosen = sys.modules["keras"].backend.backend()
        source = "Keras is imported already, with the backend "
    elif "KERAS_BACKEND" in os.environ:
        chosen = os.environ["KERAS_BACKEND"]
        source = "the environment says KERAS_BACKEND="
    else:
        folder = os.environ.get("KERAS_HOME") or pathlib.Path("~/.keras").expanduser()
        file = pathlib.Path(folder, "keras.json")
        chosen = _of_file(file)
        source = f"{file} says backend="
    if chosen not in ("", "tensorflow"):
        raise ConfigError(
            f"tfdist trains Keras models on TensorFlow, and {source}{chosen}: set KERAS_BACKEND=tensorflow before Keras is "
            "imported."
        )


def _of_file(path: pathlib.Path) -> str:
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError):
        return ""
    if not isinstance(content, dict):
        return ""
    return str(content.get("backend", ""))
