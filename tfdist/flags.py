"""The command line of `tfdist.train`: `--config`, `--config.field=value`, `--workdir`. No TensorFlow here.

`ml_collections.config_flags` sets the fields. It stops at the first mistake, some of them with a
traceback, so all overrides are looked at first and every fault is reported at once.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfdist import config as config_lib
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError, did_you_mean

_CONFIG_HELP = "Python file whose get_config() returns a tfdist.TrainConfig."


def parse(argv: Sequence[str], description: str | None) -> tuple[TrainConfig, pathlib.Path] | None:
    """Returns the checked configuration and the work directory; None where `--help` was asked for and given.

    Args:
        argv: The program's name and its arguments.
        description: What `--help` begins with.

    Raises:
        ConfigError: With every fault of the command line and the configuration.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Where results go. Default: runs/NAME_OF_THE_CONFIG_FILE.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    if any(argument in ("--help", "-help", "-h", "--h") for argument in argv[1:]):
        flags.DEFINE_string("config", None, _CONFIG_HELP, flag_values=values)
        print(f"{description}\n{values.get_help()}\n{_fields_help()}")
        return None
    path = _value(argv, "config")
    if not path:
        raise ConfigError(
            "--config is missing: a Python file whose get_config() returns a tfdist.TrainConfig, such as configs/digits.py."
        )
    config = _load(path)
    faults = list(_override_faults(config, argv))
    if faults:
        raise ConfigError(faults)
    try:
        # The file has been run, once: its value stands for its name.
        config_flags.DEFINE_config_dataclass(
            "config", config, _CONFIG_HELP, flag_values=values, sys_argv=list(argv), parse_fn=lambda path: config
        )
        rest = values(list(argv))[1:]
    except (flags.Error, TypeError, ValueError) as e:
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
        source = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"--config={path}: {getattr(e, 'strerror', None) or e}.") from None
    # Dataclasses that the file defines look their module up.
    module = sys.modules["tfdist_config"] = types.ModuleType("tfdist_config")
    namespace = vars(module)
    namespace["__file__"] = path
    try:
        exec(compile(source, path, "exec", dont_inherit=True), namespace)  # noqa: S102 (a config is a program)
        config = namespace["get_config"]()
    except ConfigError:
        raise
    except Exception as e:
        if isinstance(e, KeyError) and "get_config" not in namespace:
            raise ConfigError(f"--config={path}: the file defines no function get_config().") from None
        frames = traceback.extract_tb(e.__traceback__)
        own = [frame for frame in frames if frame.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else own[-1].lineno if own else "?"
        elsewhere = frames[-1].filename not in (path, __file__)
        origin = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if elsewhere else ""
        raise ConfigError(f"--config={path}, line {line}: {type(e).__name__}: {e}{origin}") from None
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config={path}: get_config() must return a tfdist.TrainConfig. Received: {type(config).__name__}."
        )
    return config


def _override_faults(config: TrainConfig, argv: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with each `--config.path=value` or `--noconfig.path`."""
    for argument in argv[1:]:
        flag, equals, text = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not flag.startswith(("config.", "noconfig.")):
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
            elif not _is_settable(kind):
                yield f"--{flag}: a {kind.__name__ if isinstance(kind, type) else kind} cannot be set on the command line; set it in the config file."
            elif flag.startswith("no"):
                if equals or kind is not bool:
                    yield f"--{flag}: only a field that is true or false is turned off in this way, without a value."
            elif equals and (fault := _value_fault(kind, text)):
                yield f"--{flag}: {fault}"


def _is_settable(kind: Any) -> bool:
    """Returns whether `config_flags` can set a field of this type from a text."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [member for member in typing.get_args(kind) if member is not type(None)]
        return len(kinds) == 1 and _is_settable(kinds[0])
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, (bool, int, float, str, tuple, enum.Enum))


def _value_fault(kind: Any, text: str) -> str:
    expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind)
    try:
        if expected:
            (flags.BooleanParser().parse if kind is bool else kind)(text)
    except ValueError:
        return f"expected {expected}. Received: {text!r}."
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
