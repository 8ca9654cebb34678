"""The program `tfdist`, which runs the command of its first argument. No TensorFlow here."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from tfdist.runtime.end import interrupts
from tfdist.version import __version__

# Command to its module and its line in the help.
COMMANDS = {
    "train": ("tfdist.commands.train", "train the configuration of a preset or a file"),
    "launch": (
        "tfdist.commands.launch",
        "run a script as several tasks, on this machine or on several, and restart them",
    ),
    "verify": ("tfdist.commands.verify", "compare a script's training on one device with that on several"),
    "cluster": ("tfdist.commands.cluster", "show or check the cluster of this process, emit jobs for schedulers"),
    "backup": ("tfdist.commands.backup", "show the backups of a run, export a model from a backup"),
    "stacks": ("tfdist.commands.stacks", "show where the tasks of a running job on this host are"),
    "doctor": ("tfdist.commands.doctor", "check this machine and environment, and say what to fix"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, or 2 for an unknown command.

    Args:
        argv: The program's name and its arguments. None means this process's arguments; the command may then end the process.
    """
    if argv is None:
        interrupts.end_at_once()
    from tfdist.runtime.end import process_end  # after the signal's handler, because its imports take time

    if argv is not None:
        return process_end.run_command(_main, argv)
    try:
        folder = os.getcwd()
    except OSError as e:  # the folder has been removed, so relative paths are invalid
        print(f"tfdist: the current folder cannot be used ({e.strerror}): change to another one.", file=sys.stderr)
        return 2
    # As with `python -m`, custom tasks are imported from the current folder.
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.insert(0, folder)
    code = process_end.run_command(functools.partial(_main, imported=process_end.after_imports), sys.argv)
    if "tfdist.commands.train" in sys.modules and "tensorflow" in sys.modules:
        process_end.leave(code)
    return code


def _main(argv: Sequence[str], imported: Callable[[], None] = lambda: None) -> int:
    word, *arguments = argv[1:] or [""]
    if word == "help" and arguments:  # `tfdist help train`
        word, arguments = arguments[0], ["--help"]
    name = word.replace("_", "-")
    if word in ("--help", "-h", "help"):
        print(_help())
    elif word == "--version" or (name in COMMANDS and arguments == ["--version"]):
        print(f"tfdist {__version__}")
    elif name in COMMANDS:
        module = importlib.import_module(COMMANDS[name][0])
        imported()
        return int(module.main([f"tfdist {name}", *arguments]))
    else:
        from tfdist.errors import ConfigError, unknown_name_message

        if not word:
            message = str(ConfigError("Usage: tfdist COMMAND [FLAGS]; tfdist --help lists the commands."))
        elif word.startswith("-"):
            message = unknown_name_message("flag", word, ("--help", "--version"))
        else:
            message = unknown_name_message("command", word, COMMANDS)
        print(message, file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"    tfdist {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"tfdist {__version__}: Keras 3 model.fit on every tf.distribute strategy",
            "",
            *lines,
            "",
            "tfdist COMMAND --help, or tfdist help COMMAND, explains the flags of a command. Dashes and underscores in their names are equivalent.",
            "python -m tfdist is the same as tfdist; python -m tfdist.train as tfdist train, and so for launch, cluster, backup, doctor.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
