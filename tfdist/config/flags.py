"""The command line of `tfdist train`: `--config`, `--config.field=value`, `--workdir`, `--overwrite`. No TensorFlow here.

`ml_collections.config_flags` sets the fields. It stops at the first mistake, sometimes with a traceback. So all arguments
are checked first, it gets only the valid ones, and every error is reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import pathlib
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from tfdist.config import cluster, command_line, files, validation
from tfdist.config.compression import option_type
from tfdist.config.train import TrainConfig, make_floats
from tfdist.errors import ConfigError, collect_errors, describe_error, did_you_mean, format_value, truncate

_CONFIG_HELP = (
    "A preset's name, a Python file whose get_config() returns a tfdist.TrainConfig, or the config.json of a run."
)
_HELP_WIDTH = 100


class Command(NamedTuple):
    """A parsed command line: the configuration and the work directory, without the faulty arguments, and their errors."""

    config: TrainConfig
    workdir: pathlib.Path
    faults: list[str]
    overwrite: bool


def parse(
    argv: Sequence[str], description: str | None, others: Sequence[str] = ()
) -> tuple[TrainConfig, pathlib.Path] | None:
    """Returns the checked configuration and the work directory; None where `--help` was asked for and given.

    Args:
        argv: The program's name and its arguments.
        description: The text that `--help` begins with.
        others: Flags that the caller has taken from the arguments: one that is unknown here may be meant for one of them.

    Raises:
        ConfigError: With every fault of the command line and the configuration.
    """
    if not (command := read(argv, description, others)):
        return None
    validation.check(command.config, known=command.faults)
    return command.config, command.workdir


def read(argv: Sequence[str], description: str | None, others: Sequence[str] = ()) -> Command | None:
    """Returns the parsed command line, not yet validated; None where `--help` was asked for and given.

    Args:
        argv: The program's name and its arguments.
        description: The text that `--help` begins with.
        others: As for `parse`.

    Raises:
        ConfigError: There is no configuration to be had.
    """
    faults: list[str] = []
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Where results go. Default: runs/NAME_OF_THE_CONFIG_FILE.", flag_values=values)
    overwrite = "Train again in the work directory of a finished run, whose results are replaced at the end."
    flags.DEFINE_bool("overwrite", False, overwrite, flag_values=values)
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    for name, text in cluster.FLAGS.items():
        flags.DEFINE_string(name, None, f"{text} Short for --config.cluster.{name}.", flag_values=values)
    if any(_split_flag(argument)[0] in ("help", "h") for argument in argv[1:]):
        flags.DEFINE_string("config", None, _CONFIG_HELP, flag_values=values)
        asked = _config_path(argv[1:])
        config, of = TrainConfig(), "TrainConfig"
        with collect_errors(faults):
            if asked:
                config, of = files.load(asked), asked
        names = ", ".join(files.preset_names())
        wrong = "".join(f"\n{fault}" for fault in faults)
        print(f"{description}\n{command_line.help_text(values)}\n{fields_help(config, of)}\nPresets: {names}.{wrong}")
        return None
    arguments = [_expand_cluster_flag(argument) for argument in command_line.expand(values, argv[1:])]
    path = _config_path(arguments)
    if not path:
        list(_valid_arguments(TrainConfig(), arguments, faults, others))
        # The other faults depend on the configuration.
        unknown = [fault for fault in faults if fault.startswith("unknown flag")]
        missing = (
            "--config is missing: a preset's name, such as digits, or a Python file whose get_config() returns a tfdist.TrainConfig. "
            f"Presets: {', '.join(files.preset_names())}."
        )
        raise ConfigError([missing, *unknown])
    config = files.load(path)
    task = _last_value(arguments, "config.task") or config.task
    if isinstance(task, str) and (task != config.task or config.task_options is None):
        with contextlib.suppress(ConfigError):  # which the check says, too
            config.choose_task(task)
    for group, holder in _groups_with_options(config).items():
        if chosen := _last_value(arguments, f"config.{group}.name"):
            holder.name = chosen  # whose options flags may set
    valid = [argv[0], f"--config={path}", *_valid_arguments(config, arguments, faults, others)]
    try:
        # The file has been run, once: its value stands for its name.
        config_flags.DEFINE_config_dataclass(
            "config", config, _CONFIG_HELP, flag_values=values, sys_argv=valid, parse_fn=lambda path: config
        )
        values(valid)
    except Exception as e:  # what it raises at values that it cannot take is not documented
        raise ConfigError(
            [*faults, str(e) if isinstance(e, flags.Error) else f"--config={path}: {describe_error(e)}"]
        ) from None
    make_floats(values.config)
    if "://" in (values.workdir or ""):
        faults.append(
            f"workdir must be a folder of this machine. Received: {format_value(values.workdir)}; mount it, or use backup.dir and export.dir, "
            "which take such addresses."
        )
    workdir = pathlib.Path(values.workdir or f"runs/{pathlib.Path(path).stem}")
    return Command(values.config, workdir, faults, values.overwrite)


def _split_flag(argument: str) -> tuple[str, str | None]:
    """Returns name and value of a flag; an empty name where the argument is no flag, None where it has no value."""
    name, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
    name = re.sub(r"(?<=\w)-(?=\w)", "_", name)
    return (name if argument.startswith("-") else ""), (value if equals else None)


def _expand_cluster_flag(argument: str) -> str:
    """Returns `--config.cluster.hosts=...` for `--hosts=...`, and likewise for the others of `cluster.FLAGS`."""
    name, value = _split_flag(argument)
    if name not in cluster.FLAGS:
        return argument
    return f"--config.cluster.{name}" if value is None else f"--config.cluster.{name}={value}"


def _config_path(arguments: Sequence[str]) -> str | None:
    return _last_value(arguments, "config")


def _last_value(arguments: Sequence[str], flag: str) -> str | None:
    """Returns the value of the last `--flag=value` or `--flag value`."""
    found = None
    for position, argument in enumerate(arguments):
        name, value = _split_flag(argument)
        if name == flag:
            found = _take_value(list(arguments[position + 1 :])) if value is None else value
    return found


def _take_value(following: list[str]) -> str | None:
    """Takes a flag's value from the arguments that follow it; None where it has none."""
    return following.pop(0) if following and not following[0].startswith("--") else None


def _valid_arguments(
    config: TrainConfig, arguments: Sequence[str], faults: list[str], others: Sequence[str]
) -> Iterator[str]:
    """Yields the arguments besides `--config` that can be parsed, as `--name=value`; adds a fault for each other one."""
    following = list(arguments)
    while following:
        flag, value = _split_flag(argument := following.pop(0))
        written = f"--{truncate(flag)}"
        is_field = flag.startswith(("config.", "noconfig."))
        if argument == "--":
            continue
        if not flag:
            fault = f"{format_value(argument)} is no flag. Fields are set as --config.field=value."
        elif is_field or flag in ("config", "workdir", "overwrite", "nooverwrite"):
            kind, fault = _field(config, flag, written) if is_field else (bool if "over" in flag else str, "")
            if value is None and kind is not bool and not flag.startswith("no"):
                value = _take_value(following)
                fault = fault or ("" if value is not None else f"{written} has no value; write {written}=VALUE.")
            fault = fault or _value_fault(kind, flag, written, value)
        else:
            known = [
                "config",
                "workdir",
                "overwrite",
                "help",
                *(others or cluster.FLAGS),
                *(path for path, _ in list_fields(config, "config")),
            ]
            fault = f"unknown flag {written}{did_you_mean(written, [f'--{name}' for name in known])}"
            fault += f" Known: {', '.join(['--config', '--config.field', '--workdir', '--overwrite', '--help', *map('--{}'.format, others)])}."
            if flag == "undefok":
                fault = str(command_line.undefok_error())
            if value is None:
                _take_value(following)
        if fault:
            faults.append(fault)
        elif (path := flag.removeprefix("no").split("."))[2:3] == ["options"]:  # which config_flags cannot set
            parse = flags.BooleanParser().parse if kind is bool else kind
            getattr(config, path[1]).options[path[3]] = flag[:2] != "no" if value is None else parse(value)
        elif flag != "config":
            yield f"--{flag}" if value is None else f"--{flag}={value}"


def _field(config: TrainConfig, flag: str, written: str) -> tuple[Any, str]:
    """Returns the type of the field that `config.path` or `noconfig.path` names, and why it cannot be set, if so."""
    kind: Any = None
    holder: Any = config
    for name in flag.split(".")[1:]:
        known = _fields(config, holder)
        if name not in known:
            return None, validation.unknown_field(written, name, known)
        kind = option_type(known[name]) or (object if isinstance(holder, dict) else known[name].type)
        holder = getattr(holder, name, None)
    if dataclasses.is_dataclass(holder):
        fields = dataclasses.fields(holder)
        such = f"; set one of them, such as {written}.{fields[0].name}=..." if fields else ", and has none."
        return kind, f"{written}: this is a group of fields{such}"
    if not _is_settable(kind):
        name = kind.__name__ if isinstance(kind, type) else kind
        return kind, f"{written}: a {name} cannot be set on the command line; set it in the config file."
    return kind, ""


def _fields(config: TrainConfig, holder: Any) -> Mapping[str, dataclasses.Field[Any]]:
    """Returns the fields of a group; of a group's `options` those that its name takes, empty where there is no such name."""
    if dataclasses.is_dataclass(holder):
        return {field.name: field for field in dataclasses.fields(holder)}
    with contextlib.suppress(ConfigError, AttributeError, TypeError):  # which the check says, too
        for group in _groups_with_options(config).values():
            if holder is group.options and isinstance(holder, dict):
                return group.option_fields()
    return {}


def _groups_with_options(config: TrainConfig) -> dict[str, Any]:
    """Returns the groups that name something with options of its own."""
    groups = {name: getattr(config, name) for name in ("compression", "optimizer")}
    return {name: group for name, group in groups.items() if hasattr(group, "name") and hasattr(group, "options")}


def _is_settable(kind: Any) -> bool:
    """Returns whether `config_flags` can set a field of this type from a text."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [member for member in typing.get_args(kind) if member is not type(None)]
        return len(kinds) == 1 and _is_settable(kinds[0])
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, (bool, int, float, str, tuple, enum.Enum))


def _value_fault(kind: Any, flag: str, written: str, value: str | None) -> str:
    if flag.startswith("no"):
        valid = kind is bool and value is None
        return (
            ""
            if valid
            else f"{written}: only a field that is true or false is turned off in this way, without a value."
        )
    expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind)
    try:
        if expected and value is not None:
            (flags.BooleanParser().parse if kind is bool else kind)(value)
    except ValueError:
        return f"{written}: expected {expected}. Received: {format_value(value)}."
    return ""


def fields_help(config: TrainConfig, of: str) -> str:
    """Returns the part of `--help` that lists every field of the configuration, with its value and its description.

    Args:
        config: The configuration.
        of: The source of the values, for the heading.
    """
    rows = [
        f"Fields of the configuration, with the values of {of} (--noconfig.FIELD is short for --config.FIELD=false):"
    ]
    for path, value, about in _documented_fields(config, "config"):
        rows.append(f"  --{path}={value}")
        rows += textwrap.wrap(about, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(rows)


def list_fields(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields path and value of every field."""
    for name, value, _ in _documented_fields(config, path):
        yield name, value


def _documented_fields(config: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yields path, value and description of every field."""
    kinds = (*getattr(config, "documented_by", ()), type(config))
    about = {name: text for kind in kinds for name, text in attribute_texts(kind).items()}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _documented_fields(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value, about.get(field.name, "")


def attribute_texts(kind: type) -> dict[str, str]:
    """Returns the texts in the section "Attributes:" of a class's docstring, by name."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begun := re.match(r" {4}(\w+): (.*)", line):
            name = begun[1]
            found[name] = begun[2]
        elif line.startswith(" " * 8) and name:
            found[name] += f" {line.strip()}"
        elif line.strip():
            break
    return found
