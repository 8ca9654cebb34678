"""The command line of `tfdist.train`: `--config`, `--config.field=value`, `--workdir`. No TensorFlow here.

`ml_collections.config_flags` reads the file and sets the fields. It stops at the first mistake, some of them with a
traceback, so all overrides are looked at first and every fault is reported at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfdist import config as config_lib
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError, did_you_mean


def parse(argv: Sequence[str], description: str | None) -> tuple[TrainConfig, pathlib.Path] | None:
    """Returns the checked configuration and the work directory; None where `--help` was asked for and given.

    Args:
        argv: The program's name and its arguments.
        description: What `--help` begins with.

    Raises:
        ConfigError: With every fault of the command line and the configuration.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "Python file whose get_config() returns a tfdist.TrainConfig.", flag_values=values
    )
    flags.DEFINE_string("workdir", None, "Where results go. Default: runs/NAME_OF_THE_CONFIG_FILE.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    if any(argument in ("--help", "-help", "-h", "--h") for argument in argv[1:]):
        print(f"{description}\n{values.get_help()}\n{_fields_help()}")
        return None
    path = _value(argv, "config")
    if not path:
        raise ConfigError(
            "--config is missing: a Python file whose get_config() returns a tfdist.TrainConfig, such as configs/digits.py."
        )
    faults = list(_override_faults(_load(path), argv))
    if faults:
        raise ConfigError(faults)
    try:
        rest = values(list(argv))[1:]
    except flags.Error as e:
        raise ConfigError(str(e)) from None
    if rest:
        raise ConfigError(f"Arguments that are no flags: {' '.join(rest)}. Fields are set as --config.field=value.")
    config_lib.check(values.config)
    return values.config, pathlib.Path(values.workdir or pathlib.Path("runs") / pathlib.Path(path).stem)


def _value(argv: Sequence[str], name: str) -> str | None:
    """Returns the value of the last `--name=value` or `--name value`."""
    found = None
    for position, argument in enumerate(argv):
        flag, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and flag == name:
            found = value if equals else (argv[position + 1] if position + 1 < len(argv) else None)
    return found


def _load(path: str) -> TrainConfig:
    """Returns what a config file's get_config() returns, its own traceback shortened to its own line."""
    try:
        namespace: dict[str, Any] = {"__name__": "config", "__file__": path}
        exec(compile(pathlib.Path(path).read_text(), path, "exec"), namespace)  # noqa: S102 (a config is a program)
        config = namespace["get_config"]()
    except OSError as e:
        raise ConfigError(f"--config={path}: {e.strerror}.") from None
    except ConfigError:
        raise
    except Exception as e:
        if isinstance(e, KeyError) and "get_config" not in namespace:
            raise ConfigError(f"--config={path}: the file defines no function get_config().") from None
        own = [frame for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else own[-1].lineno if own else "?"
        raise ConfigError(f"--config={path}, line {line}: {type(e).__name__}: {e}") from None
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config={path}: get_config() must return a tfdist.TrainConfig. Received: {type(config).__name__}."
        )
    return config


def _override_faults(config: TrainConfig, argv: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with each `--config.path=value`."""
    for argument in argv[1:]:
        flag, equals, text = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not flag.startswith("config."):
            continue
        holder: Any = config
        *parents, name = flag.split(".")[1:]
        for part in (*parents, name):
            known = (
                {field.name: field for field in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else {}
            )
            if part not in known:
                fields = f"Known: {', '.join(known)}." if known else "It has no fields."
                yield f"--{flag}: unknown config field {part!r}{did_you_mean(part, known)} {fields}"
                break
            kind, holder = known[part].type, getattr(holder, part)
        else:
            if dataclasses.is_dataclass(holder):
                yield f"--{flag}: this is a group of fields; set one of them, such as --{flag}.{dataclasses.fields(holder)[0].name}=..."
            elif equals and kind in (int, float) and (fault := _number_fault(kind, text)):
                yield f"--{flag}: {fault}"


def _number_fault(kind: type, text: str) -> str:
    try:
        kind(text)
    except ValueError:
        return f"expected {'a whole number' if kind is int else 'a number'}. Received: {text!r}."
    return ""


def _fields_help() -> str:
    """Returns every field of the configuration with its default."""

    def rows(config: Any, path: str) -> Iterator[str]:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                yield from rows(value, f"{path}.{field.name}")
            else:
                yield f"  --{path}.{field.name}={value}"

    return "Fields of the configuration, with the defaults of TrainConfig:\n" + "\n".join(rows(TrainConfig(), "config"))
