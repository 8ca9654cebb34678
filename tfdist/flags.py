"""The command line of `tfdist.train`: `--config`, `--config.field=value`, `--workdir`. No TensorFlow here.

`ml_collections.config_flags` sets the fields. It stops at the first mistake, some of them with a traceback, so all
arguments are looked at first, it gets those that are sound, and every fault is reported at once.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from tfdist import check, host_list
from tfdist import config as config_lib
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError, collected, did_you_mean, short, shown

_CONFIG_HELP = "Python file whose get_config() returns a tfdist.TrainConfig."


def parse(
    argv: Sequence[str],
    description: str | None,
    workers: Callable[[TrainConfig], int | None] = lambda config: None,
) -> tuple[TrainConfig, pathlib.Path] | None:
    """Returns the checked configuration and the work directory; None where `--help` was asked for and given.

    Args:
        argv: The program's name and its arguments.
        description: What `--help` begins with.
        workers: Returns what `check.check` is told of the cluster that the configuration asks for.

    Raises:
        ConfigError: With every fault of the command line and the configuration.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Where results go. Default: runs/NAME_OF_THE_CONFIG_FILE.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    for name, text in host_list.FLAGS.items():
        flags.DEFINE_string(name, None, f"{text} Short for --config.cluster.{name}.", flag_values=values)
    if any(_split(argument)[0] in ("help", "h") for argument in argv[1:]):
        flags.DEFINE_string("config", None, _CONFIG_HELP, flag_values=values)
        print(f"{description}\n{values.get_help()}\n{_fields_help()}")
        return None
    try:
        arguments = values.read_flags_from_files(list(argv[1:]), force_gnu=True)
    except (flags.Error, OSError, ValueError) as e:
        raise ConfigError(f"--flagfile: {e}") from None
    arguments = [_in_full(argument) for argument in arguments]
    path = _config_path(arguments)
    if not path:
        raise ConfigError(
            "--config is missing: a Python file whose get_config() returns a tfdist.TrainConfig, such as configs/digits.py."
        )
    config = _load(path)
    faults: list[str] = []
    sound = [argv[0], f"--config={path}", *_sound_arguments(config, arguments, faults)]
    try:
        # The file has been run, once: its value stands for its name.
        config_flags.DEFINE_config_dataclass(
            "config", config, _CONFIG_HELP, flag_values=values, sys_argv=sound, parse_fn=lambda path: config
        )
        values(sound)
    except Exception as e:  # what it raises at values that it cannot take is not documented
        raise ConfigError([*faults, str(e) if isinstance(e, flags.Error) else f"--config={path}: {_told(e)}"]) from None
    with collected(faults):
        check.check(values.config, workers(values.config))
    if faults:
        raise ConfigError(faults)
    return values.config, pathlib.Path(values.workdir or pathlib.Path("runs") / pathlib.Path(path).stem)


def _split(argument: str) -> tuple[str, str | None]:
    """Returns name and value of a flag; an empty name where the argument is no flag, None where it has no value."""
    name, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
    return (name if argument.startswith("-") else ""), (value if equals else None)


def _in_full(argument: str) -> str:
    """Returns `--config.cluster.hosts=...` for `--hosts=...`, and likewise for the others of `host_list.FLAGS`."""
    name, value = _split(argument)
    if name not in host_list.FLAGS:
        return argument
    return f"--config.cluster.{name}" if value is None else f"--config.cluster.{name}={value}"


def _take_value(following: list[str]) -> str | None:
    """Takes a flag's value from the arguments that follow it; None where it has none."""
    return following.pop(0) if following and not following[0].startswith("--") else None


def _config_path(arguments: Sequence[str]) -> str | None:
    """Returns the value of the last `--config=value` or `--config value`."""
    found = None
    for position, argument in enumerate(arguments):
        name, value = _split(argument)
        if name == "config":
            found = _take_value(list(arguments[position + 1 :])) if value is None else value
    return found


def _load(path: str) -> TrainConfig:
    """Returns what a config file's get_config() returns, its own traceback shortened to its own line."""
    try:
        source = pathlib.Path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise ConfigError(f"--config={path}: {getattr(e, 'strerror', None) or e}.") from None
    # Dataclasses that the file defines look their module up.
    module = sys.modules["tfdist_config"] = types.ModuleType("tfdist_config")
    namespace = vars(module)
    namespace["__file__"] = path
    try:
        exec(compile(source, path, "exec", dont_inherit=True), namespace)  # noqa: S102 (a config is a program)
        config = namespace["get_config"]()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # sys.exit(), too: no training has taken place
        if isinstance(e, KeyError) and "get_config" not in namespace:
            raise ConfigError(f"--config={path}: the file defines no function get_config().") from None
        told = _told(e)
        line, origin = _place(e, path)
        raise ConfigError(f"--config={path}{line}: {told}{_nearest_field(told, namespace)}{origin}") from None
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"--config={path}: get_config() must return a tfdist.TrainConfig. Received: {type(config).__name__}."
        )
    return config


def _place(error: BaseException, path: str) -> tuple[str, str]:
    """Returns the config file's own line in an error, and where outside of the file the error was raised, or nothing."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.lineno:
        frames.append((error.filename or "", error.lineno))
    line = next((f", line {line}" for name, line in reversed(frames) if name == path), "")
    outside = frames[-1][0] not in (path, __file__)
    return line, f" (raised at {frames[-1][0]}:{frames[-1][1]})" if outside else ""


def _told(error: BaseException) -> str:
    """Returns type and message of an error."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # the user's own __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _nearest_field(told: str, namespace: dict[str, Any]) -> str:
    """Returns the field nearest to one that a dataclass was given and does not have, where that is what is told."""
    match = re.fullmatch(r"TypeError: (\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", told)
    kind = match and (namespace.get(match[1]) or getattr(config_lib, match[1], None))
    if match is None or not dataclasses.is_dataclass(kind):
        return ""
    return did_you_mean(match[2], [field.name for field in dataclasses.fields(kind)])


def _sound_arguments(config: TrainConfig, arguments: Sequence[str], faults: list[str]) -> Iterator[str]:
    """Yields the arguments besides `--config` that can be parsed, as `--name=value`; adds a fault for each other one."""
    following = list(arguments)
    while following:
        flag, value = _split(argument := following.pop(0))
        written = f"--{short(flag)}"
        is_field = flag.startswith(("config.", "noconfig."))
        if argument == "--":
            continue
        if not flag:
            fault = f"{shown(argument)} is no flag. Fields are set as --config.field=value."
        elif is_field or flag in ("config", "workdir"):
            kind, fault = _field(config, flag, written) if is_field else (str, "")
            if value is None and kind is not bool and not flag.startswith("no"):
                value = _take_value(following)
                fault = fault or ("" if value is not None else f"{written} has no value; write {written}=VALUE.")
            fault = fault or _value_fault(kind, flag, written, value)
        else:
            known = ["config", "workdir", "help", *host_list.FLAGS, *(path for path, _ in _fields(config, "config"))]
            fault = f"unknown flag {written}{did_you_mean(written, [f'--{name}' for name in known])}"
            fault += " Known: --config, --config.field, --workdir, --help."
            if value is None:
                _take_value(following)
        if fault:
            faults.append(fault)
        elif flag != "config":
            yield f"--{flag}" if value is None else f"--{flag}={value}"


def _field(config: TrainConfig, flag: str, written: str) -> tuple[Any, str]:
    """Returns the type of the field that `config.path` or `noconfig.path` names, and why it cannot be set, if so."""
    kind, holder = None, config
    for name in flag.split(".")[1:]:
        known = {field.name: field for field in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else {}
        if name not in known:
            return None, check.unknown_field(written, name, known)
        kind, holder = known[name].type, getattr(holder, name)
    if dataclasses.is_dataclass(holder):
        fields = dataclasses.fields(holder)
        such = f"; set one of them, such as {written}.{fields[0].name}=..." if fields else ", and has none."
        return kind, f"{written}: this is a group of fields{such}"
    if not _is_settable(kind):
        name = kind.__name__ if isinstance(kind, type) else kind
        return kind, f"{written}: a {name} cannot be set on the command line; set it in the config file."
    return kind, ""


def _is_settable(kind: Any) -> bool:
    """Returns whether `config_flags` can set a field of this type from a text."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [member for member in typing.get_args(kind) if member is not type(None)]
        return len(kinds) == 1 and _is_settable(kinds[0])
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, (bool, int, float, str, tuple, enum.Enum))


def _value_fault(kind: Any, flag: str, written: str, value: str | None) -> str:
    if flag.startswith("no"):
        sound = kind is bool and value is None
        return (
            ""
            if sound
            else f"{written}: only a field that is true or false is turned off in this way, without a value."
        )
    expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind)
    try:
        if expected and value is not None:
            (flags.BooleanParser().parse if kind is bool else kind)(value)
    except ValueError:
        return f"{written}: expected {expected}. Received: {shown(value)}."
    return ""


def _fields(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields path and value of every field."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value


def _fields_help() -> str:
    """Returns every field of the configuration with its default."""
    rows = [f"  --{path}={value}" for path, value in _fields(TrainConfig(), "config")]
    return "Fields of the configuration, with the defaults of TrainConfig:\n" + "\n".join(rows)
