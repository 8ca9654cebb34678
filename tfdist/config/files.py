"""The loader of `--config`: a Python file, a preset's name, or the `config.json` of a run. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from typing import Any

from tfdist import config as config_lib
from tfdist.config.options import NamedOptions, known_fields, unknown_field
from tfdist.config.presets import PRESETS, preset
from tfdist.config.train import TrainConfig
from tfdist.errors import ConfigError, describe_error, did_you_mean, format_value
from tfdist.runtime.files import read_file
from tfdist.runtime.folders import storage


def load(path: str) -> TrainConfig:
    """Returns the configuration of a file or a preset.

    Args:
        path: A Python file whose `get_config()` returns the configuration, a run's `config.json`, or a preset's name.

    Raises:
        ConfigError: The configuration is invalid; the error lists every problem. An exception in the file is reported with the file's line.
    """
    if not pathlib.Path(path).suffix and not os.path.exists(path):
        if path not in PRESETS:
            raise ConfigError(
                f"--config={path}: no such file, and no preset{did_you_mean(path, PRESETS)} Presets: {', '.join(PRESETS)}."
            )
        return preset(path)
    try:
        source = read_config(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--config={path}: {getattr(e, 'strerror', None) or e}.") from None
    if path.endswith(".json"):
        return _of_json(path, source)
    return _of_program(path, source)


def read_config(path: str) -> bytes:
    """Returns the content of a file at a path or a URL. Raises OSError, or ValueError if the file is too large."""
    if storage.is_url(path):
        return storage.read(path)
    return read_file(path)


def _of_program(path: str, source: bytes) -> TrainConfig:
    # Dataclasses that the file defines look up their module in `sys.modules`.
    module = sys.modules["tfdist_config"] = types.ModuleType("tfdist_config")
    namespace = vars(module)
    namespace["__file__"] = path
    try:
        exec(compile(source, path, "exec", dont_inherit=True), namespace)  # noqa: S102 (a config is a program)
        config = namespace["get_config"]()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # sys.exit(), too: it must not look like a finished training
        if isinstance(e, KeyError) and "get_config" not in namespace:
            raise ConfigError(f"--config={path}: the file defines no function get_config().") from None
        # Python 3.13 adds the hint, but only for some names.
        text = re.sub(r"\. Did you mean '\w+'\?$", "", describe_error(e))
        if isinstance(e, ModuleNotFoundError) and (e.name or "").startswith("tfdist."):
            text += "; import public names from tfdist itself, as `from tfdist import Task`"
        elif isinstance(e, ModuleNotFoundError):
            text += "; modules are searched in the current folder and on PYTHONPATH"
        line, origin = _error_location(e, path)
        raise ConfigError(f"--config={path}{line}: {text}{_nearest_field(text, namespace)}{origin}") from None
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config={path}: get_config() must return a tfdist.TrainConfig. Received: {type(config).__name__}."
        )
    return config


def _of_json(path: str, source: bytes) -> TrainConfig:
    try:
        values = json.loads(source)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--config={path}: no JSON: {describe_error(e)}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config={path}: expected an object with the fields of a TrainConfig. Received: {format_value(values)}."
        )
    config = TrainConfig()
    task = values.get("task")
    if isinstance(task, str):
        config.choose_task(task)
    faults = list(_assign(config, values, "config"))
    if faults:
        raise ConfigError([f"--config={path}: {fault}" for fault in faults])
    return config


def _assign(holder: Any, values: dict[str, Any], path: str) -> Iterator[str]:
    """Sets the fields of a configuration, and recursively those of its groups; yields the errors."""
    if isinstance(holder, NamedOptions) and "name" in values:
        holder.name = values["name"]  # first, because the other values may be options of this name
    known, takes_any = known_fields(holder)
    for name, value in values.items():
        if name not in known and not takes_any:
            yield unknown_field(f"{path}.{name}", holder, name)
            continue
        group = getattr(holder, name, None)
        if dataclasses.is_dataclass(group) and isinstance(value, dict):
            yield from _assign(group, value, f"{path}.{name}")
            continue
        kind, _ = known.get(name, (None, None))
        if isinstance(value, list) and tuple in (kind, typing.get_origin(kind)):  # JSON has no tuples
            value = tuple(value)
        setattr(holder, name, value)


def _error_location(error: BaseException, path: str) -> tuple[str, str]:
    """Returns the config file's line in an error; also the location of the `raise` if that is outside of the file."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.lineno:
        frames.append((error.filename or "", error.lineno))
    line = next((f", line {line}" for name, line in reversed(frames) if name == path), "")
    raised_in, raised_at = frames[-1]
    if raised_in in (path, __file__):
        return line, ""
    return line, f" (raised at {raised_in}:{raised_at})"


def _nearest_field(text: str, namespace: dict[str, Any]) -> str:
    """Returns the nearest field's name if the error is about an argument that a dataclass does not have."""
    match = re.fullmatch(r"TypeError: (\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    if match is None:
        return ""
    kind = namespace.get(match[1]) or getattr(config_lib, match[1], None)
    if not dataclasses.is_dataclass(kind):
        return ""
    return did_you_mean(match[2], [field.name for field in dataclasses.fields(kind)])
