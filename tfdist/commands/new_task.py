"""Writes the first files of your own task. No TensorFlow here.

    tfdist new-task my_task [--dir=.]   # the same: python -m tfdist.commands.new_task my_task

It creates the package `my_task` in `--dir`: the task, a configuration that trains it, and a test of both.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.errors import ConfigError, format_value, printable, printable_lines
from tfdist.runtime.end import process_end


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for an invalid command line."""
    values = command_line.new_flags()
    flags.DEFINE_string("dir", ".", "The folder in which to create the package.", flag_values=values)
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if len(words) != 1:
            raise ConfigError(f"Usage: tfdist new-task NAME [--dir=DIR]. Received: {' '.join(argv[1:]) or 'nothing'}")
        package = new_task(words[0], pathlib.Path(values.dir))
    except BrokenPipeError:  # `--help | head`
        raise
    except (ConfigError, OSError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    print(printable(f"{package}: in {package.parent}, run tfdist train --config={package.name}/config.py"))
    return 0


def new_task(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the package of a new task.

    Args:
        name: The package's name; the class has the same name in CamelCase, `MyTask` for `my_task`.
        folder: The folder in which to create the package.

    Returns:
        The package's folder.

    Raises:
        ConfigError: The name is not a Python identifier, belongs to another package, or exists in `folder`.
        OSError: The files cannot be written.
    """
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not all(identifier.isidentifier() and not keyword.iskeyword(identifier) for identifier in (name, class_name)):
        raise ConfigError(
            f"The name of a task must be a Python identifier, such as my_task. Received: {format_value(name)}."
        )
    package = folder / name
    if package.exists():
        raise ConfigError(f"{package} exists already; choose another name, or another folder with --dir.")
    if name.startswith("__"):
        raise ConfigError(
            f"Names that begin with __ are Python's own; choose another name, such as my_task. Received: {format_value(name)}."
        )
    if importlib.util.find_spec(name):
        raise ConfigError(
            f"{name} is the name of an importable module, which the task would hide; choose another name."
        )
    package.mkdir(parents=True)
    names = {"my_task": name, "MyTask": class_name}
    for template in (importlib.resources.files("tfdist.tasks") / "starter").iterdir():
        text = re.sub("|".join(names), lambda match: names[match[0]], template.read_text(encoding="utf-8"))
        (package / template.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
    return package


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
