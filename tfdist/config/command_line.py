"""The flags of all commands except `tfdist train`. No TensorFlow here."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence

from absl import flags

from tfdist.errors import ConfigError, unknown_name_message
from tfdist.runtime.files import read_file


def new_flags() -> flags.FlagValues:
    """Returns the flags of a command, to which it adds its own: `--help`, or `-h`."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    return values


def undefok_error() -> ConfigError:
    """Returns the error for absl's `--undefok`."""
    return ConfigError("--undefok is not supported, as it hides misspelled flags: remove it, and the unknown flags.")


def help_text(values: flags.FlagValues) -> str:
    """Returns absl's help for flags, without `--undefok`."""
    return re.sub(r"^  --undefok:.*\n(?:    .*(?:\n|$))*", "", values.get_help(), flags=re.MULTILINE)


def read_flags(values: flags.FlagValues, argv: Sequence[str], known_only: bool = False) -> list[str]:
    """Sets flags from a command line; returns the program's name and the arguments that are not flags.

    Args:
        values: The defined flags.
        argv: The program's name and its arguments. Dashes in flag names stand for underscores, and `--no-x` for `--nox`. If `values` stop
            at the first word that is not a flag (`set_gnu_getopt(False)`), that word and all later ones are returned unchanged.
        known_only: Whether to leave unknown flags to the caller.

    Raises:
        ConfigError: A flag is unknown.
        Error: absl rejects a flag's value.
    """
    try:
        remaining: list[str] = values([argv[0], *expand(values, argv[1:])], known_only=known_only)
    except flags.UnrecognizedFlagError as e:
        raise unknown_flag(f"--{e.flagname}", values) from e
    except flags.IllegalFlagValueError as e:
        sentence = _rephrase(str(e))
        raise ConfigError(sentence) from e
    except ValueError as e:  # --nojson=3
        raise ConfigError(f"{e}.") from e
    return remaining


def _rephrase(text: str) -> str:
    """Returns absl's message for an invalid value, in the form of tfdist's messages."""
    text = text.replace("invalid literal for int() with base 10:", "expected a whole number. Received:")
    text = text.replace("could not convert string to float:", "expected a number. Received:")
    return re.sub(r"\('Non-boolean argument to boolean flag', (.*)\)$", r"expected true or false. Received: \1", text)


def unknown_flag(written: str, values: flags.FlagValues) -> ConfigError:
    """Returns the error for an unknown flag, with the nearest known flag."""
    return ConfigError(unknown_name_message("flag", written, [f"--{name}" for name in values if len(name) > 1]))


def expand(values: flags.FlagValues, arguments: Sequence[str], within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the arguments with each `--flagfile` replaced by its lines, and with underscores for the dashes in names of known flags.

    Args:
        values: The defined flags.
        arguments: The arguments; the values of flags are not changed.
        within: The flag files that are being read.

    Raises:
        ConfigError: A flag file cannot be read, or includes itself; or an argument is `--undefok`.
    """
    following = iter(arguments)
    for argument in following:
        name, equals, value = argument.partition("=")
        known = re.sub(r"(?<=\w)-(?=\w)", "_", name)
        flag = known.lstrip("-")
        positive = flag.removeprefix("no_")
        if positive != flag and flag not in values and positive in values and values[positive].boolean:
            flag = f"no{positive}"
            known = f"--{flag}"
        if argument == "--" or not (name.startswith("-") or values.is_gnu_getopt()):
            yield argument
            yield from following
        elif name in ("--flagfile", "-flagfile"):
            if not equals:
                value = next(following, "")
            path = os.path.expanduser(value.strip())
            if not path:
                raise ConfigError("--flagfile has no value; write --flagfile=FILE.")
            yield from expand(values, _flags_in(path, within), (*within, path))
        elif name.startswith("-") and flag == "undefok":
            raise undefok_error()
        elif not name.startswith("-") or (flag not in values and flag.removeprefix("no") not in values):
            yield argument
        else:
            yield known + equals + value
            # The next word is the flag's value, even if it looks like a flag.
            if not equals and flag in values and not values[flag].boolean:
                yield from itertools.islice(following, 1)


def _flags_in(path: str, within: tuple[str, ...]) -> list[str]:
    if path in within:
        raise ConfigError(f"--flagfile: {path} includes itself; remove that --flagfile from it.")
    try:
        lines = map(str.strip, read_file(path).decode().splitlines())
    except (OSError, ValueError) as e:
        raise ConfigError(f"--flagfile: {path}: {getattr(e, 'strerror', None) or e}.") from None
    return [line for line in lines if line and not line.startswith(("#", "//"))]
