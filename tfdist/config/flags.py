"""The command line of `tfdist train`: `--config`, `--config.field=value`, `--workdir`, `--overwrite`. No TensorFlow here.

Every mistake is reported, not only the first one.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from tfdist.config import cluster, command_line, files, flag_values, validation, walk
from tfdist.config.field_help import documented_fields, fields_help, screen
from tfdist.config.options import NamedOptions, known_fields, unknown_field
from tfdist.config.presets import PRESETS
from tfdist.config.train import NAMED_OPTIONS, TrainConfig
from tfdist.errors import ConfigError, collect_errors, did_you_mean, format_value, truncate
from tfdist.runtime.folders import storage

_CONFIG_HELP = (
    "A preset's name, a Python file whose get_config() returns a tfdist.TrainConfig, or the config.json of a run."
)


class Command(NamedTuple):
    """A parsed command line: the configuration and the work directory, a text if it is a URL, from the valid arguments, and the errors of the others."""

    config: TrainConfig
    workdir: pathlib.Path | str
    faults: list[str]
    overwrite: bool


def parse(
    argv: Sequence[str], description: str | None, others: Sequence[str] = ()
) -> tuple[TrainConfig, pathlib.Path | str] | None:
    """Returns the validated configuration and the work directory, a text if it is a URL; None after `--help`, which is printed.

    Args:
        argv: The program's name and its arguments.
        description: The text that `--help` begins with.
        others: Flags that the caller has removed from the arguments; the error for an unknown flag suggests these, too.

    Raises:
        ConfigError: The command line or the configuration is invalid; the error lists every problem.
    """
    command = read(argv, description, others)
    if command is None:
        return None
    validation.check(command.config, known=command.faults)
    return command.config, command.workdir


def read(argv: Sequence[str], description: str | None, others: Sequence[str] = ()) -> Command | None:
    """Returns the parsed command line, not yet validated; None after `--help`, `--help=GROUP` or `--helpfull`, which is printed.

    Args:
        argv: The program's name and its arguments.
        description: The text that `--help` begins with.
        others: As for `parse`.

    Raises:
        ConfigError: `--config` is missing, or cannot be loaded; or `--help` names no group of fields.
    """
    faults: list[str] = []
    values = command_line.new_flags()
    flags.DEFINE_string(
        "workdir",
        None,
        "The folder of the results, or its URL (s3://bucket/run). Default: runs/NAME_OF_THE_CONFIG_FILE.",
        flag_values=values,
    )
    overwrite = "Train again in the work directory of a finished run, whose results are replaced at the end."
    flags.DEFINE_bool("overwrite", False, overwrite, flag_values=values)
    for name, text in cluster.FLAGS.items():
        flags.DEFINE_string(name, None, f"{text} Short for --config.cluster.{name}.", flag_values=values)
    topics = [value or name for name, value in map(_split_flag, argv[1:]) if name in ("help", "h", "helpfull")]
    if topics:
        flags.DEFINE_string("config", None, _CONFIG_HELP, flag_values=values)
        config, source = TrainConfig(), _last_value(argv[1:], "config") or ""
        with collect_errors(faults):
            config = files.load(source) if source else config
        if topics[0] == "helpfull":
            text = f"{command_line.help_text(values)}\n{fields_help(config, source)}"
        elif topics[0] in ("help", "h"):
            text = screen({name: str(values[name].help) for name in ("config", "workdir", "overwrite")}, config, source)
        else:
            text = fields_help(config, source, topics[0])
        print("\n".join([description or "", text, f"Presets: {', '.join(PRESETS)}.", *faults]))
        return None
    arguments = [_expand_cluster_flag(argument) for argument in command_line.expand(values, argv[1:])]
    path = _last_value(arguments, "config")
    if not path:
        _set_all(TrainConfig(), arguments, faults, others)
        # Only unknown flags: the other errors depend on the configuration.
        unknown = [fault for fault in faults if fault.startswith("unknown flag")]
        missing = (
            "--config is missing: a preset's name, such as digits, or a Python file whose get_config() returns a tfdist.TrainConfig. "
            f"Presets: {', '.join(PRESETS)}."
        )
        raise ConfigError([missing, *unknown])
    config = files.load(path)
    _set_names(config, arguments)
    others_set = _set_all(config, arguments, faults, others)
    walk.make_floats(config)
    workdir = others_set.get("workdir") or f"runs/{pathlib.Path(path).stem}"
    faults += storage.faults("workdir", workdir)
    folder: pathlib.Path | str = pathlib.Path(workdir)
    if storage.is_url(workdir):
        folder = workdir.rstrip("/")
    return Command(config, folder, faults, others_set.get("overwrite", False))


def _split_flag(argument: str) -> tuple[str, str | None]:
    """Returns a flag's name and value: an empty name if the argument is not a flag, the value None if the flag has no value."""
    written, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
    name = ""
    if argument.startswith("-"):
        name = re.sub(r"(?<=\w)-(?=\w)", "_", written)
    if not equals:
        return name, None
    return name, value


def _expand_cluster_flag(argument: str) -> str:
    """Returns `--config.cluster.hosts=...` for `--hosts=...`, and the same for the other flags in `cluster.FLAGS`."""
    name, value = _split_flag(argument)
    if name not in cluster.FLAGS:
        return argument
    if value is None:
        return f"--config.cluster.{name}"
    return f"--config.cluster.{name}={value}"


def _last_value(arguments: Sequence[str], flag: str) -> str | None:
    """Returns the value of the last `--flag=value` or `--flag value`."""
    last = None
    for position, argument in enumerate(arguments):
        name, value = _split_flag(argument)
        if name == flag:
            last = value
            if value is None:
                last = _take_value(list(arguments[position + 1 :]))
    return last


def _take_value(following: list[str]) -> str | None:
    """Removes a flag's value from the arguments that follow the flag, and returns it; None if the flag has no value."""
    if not following or following[0].startswith("--"):
        return None
    return following.pop(0)


def _set_names(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Sets the task and the names of named options before any option, so that flags may come in any order."""
    task = _last_value(arguments, "config.task") or config.task
    if isinstance(task, str) and (task != config.task or config.task_options is None):
        try:
            config.choose_task(task)
        except ConfigError:  # validation reports it, too
            pass
    for field in NAMED_OPTIONS:
        group = getattr(config, field)
        name = _last_value(arguments, f"config.{field}.name")
        if isinstance(group, NamedOptions) and name:
            group.rename(name)


def _set_all(config: TrainConfig, arguments: Sequence[str], faults: list[str], others: Sequence[str]) -> dict[str, Any]:
    """Sets the fields that flags name; returns the values of the other flags, and appends an error for each invalid argument."""
    following = list(arguments)
    assigned: dict[str, Any] = {}
    while following:
        argument = following.pop(0)
        flag, value = _split_flag(argument)
        written = f"--{truncate(flag)}"
        turns_off = flag.startswith(("noconfig.", "nooverwrite"))
        name = flag.removeprefix("no") if turns_off else flag
        if argument == "--":
            continue
        if not flag:
            faults.append(f"{format_value(argument)} is not a flag. Fields are set as --config.field=value.")
            continue
        is_field = name.startswith("config.")
        if not is_field and name not in ("config", "workdir", "overwrite"):
            faults.append(_unknown_flag(config, flag, written, others))
            if value is None:
                _take_value(following)
            continue
        holder: Any = None
        kind: Any = str
        fault = ""
        if is_field:
            holder, kind, fault = _find_field(config, name, written)
        elif name == "overwrite":
            kind = bool
        if value is None and kind is not bool and not turns_off:
            value = _take_value(following)
            if value is None and not fault:
                fault = f"{written} has no value; write {written}=VALUE."
        if not fault and turns_off and (kind is not bool or value is not None):
            fault = f"{written}: only a field that is true or false can be turned off by --no, without a value."
        parsed: Any = not turns_off
        if value is not None and not fault:
            try:
                parsed = flag_values.parse(kind, value)
            except ValueError as e:
                fault = f"{written}: expected {e}. Received: {format_value(value)}."
        if fault:
            faults.append(fault)
        elif is_field:
            setattr(holder, name.rpartition(".")[2], parsed)
        else:
            assigned[name] = parsed
    return assigned


def _unknown_flag(config: TrainConfig, flag: str, written: str, others: Sequence[str]) -> str:
    if flag == "undefok":
        return str(command_line.undefok_error())
    known = ["config", "workdir", "overwrite", "help", "helpfull", *(others or cluster.FLAGS)]
    known += [path for path, _, _ in documented_fields(config, "config")]
    hint = did_you_mean(written, [f"--{name}" for name in known])
    listed = ["--config", "--config.field", "--workdir", "--overwrite", "--help", *map("--{}".format, others)]
    return f"unknown flag {written}{hint} Known: {', '.join(listed)}."


def _find_field(config: TrainConfig, path: str, written: str) -> tuple[Any, Any, str]:
    """Returns the holder and the type of the field that `config.path` names, and why it cannot be set or an empty text."""
    holder: Any = None
    kind: Any = None
    value: Any = config
    for name in path.split(".")[1:]:
        holder = value
        known, takes_any = known_fields(holder)
        if name not in known and not (takes_any and name.isidentifier()):
            return holder, kind, unknown_field(written, holder, name)
        kind, _ = known.get(name, (object, None))
        value = getattr(holder, name, None)
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        such = ", and has none."
        if fields:
            such = f"; set one of them, such as {written}.{fields[0]}=..."
        return holder, kind, f"{written}: this is a group of fields{such}"
    if not flag_values.is_settable(kind):
        shown = kind.__name__ if type(kind) is type else kind
        return holder, kind, f"{written}: a {shown} cannot be set on the command line; set it in the config file."
    return holder, kind, ""
