"""Starts, watches, restarts and ends the tasks of a cluster on this machine. No TensorFlow here.

    tfdist launch --workers=2 --max-restarts=3 -- python script.py --its --flags   # or: python -m tfdist.launch

Every task gets its own TF_CONFIG. Its output is shown behind its name and kept in `LOG_DIR/<task>.log`. The first task
that fails is named with the reason; the launcher then ends all others, or restarts them. No process is left over, whatever is
killed: each task leads a process group, and a guardian process kills the groups when the launcher is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfdist.runtime import interrupt

if __name__ == "__main__":
    interrupt.before_imports()

from tfdist.config import command_line
from tfdist.errors import ConfigError, printable_lines
from tfdist.launch import network_namespaces
from tfdist.launch.launcher import Launcher
from tfdist.runtime.log import logger, print_always

_MOST = 10_000  # tasks; more are a mistake


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist launch`; returns the exit code: of `Launcher.run`, or 2 for a faulty command line."""
    from absl import flags

    print_always()
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "workers", 1, "Number of training tasks.", lower_bound=1, upper_bound=_MOST, flag_values=values
    )
    flags.DEFINE_integer(
        "ps",
        0,
        "Number of parameter servers; a chief comes on top.",
        lower_bound=0,
        upper_bound=_MOST,
        flag_values=values,
    )
    flags.DEFINE_string("log_dir", "logs", "Folder for each task's full output.", flag_values=values)
    flags.DEFINE_float(
        "grace_seconds", 25.0, "Time to end after a signal before SIGKILL.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer("max_restarts", 0, "Restarts that failures may cost.", lower_bound=0, flag_values=values)
    flags.DEFINE_string(
        "netns", os.environ.get(network_namespaces.VARIABLE, ""), network_namespaces.HELP, flag_values=values
    )
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    arguments = list(argv[1:])
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]
    try:
        rest = command_line.read_flags(values, [argv[0], *arguments[:split]])[1:]
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
            return 0
        if rest or not command:
            raise ConfigError(
                "Usage: tfdist launch [--workers=N] [--ps=N] [--log_dir=DIR] [--grace_seconds=S] [--max_restarts=N] [--netns=A,B] "
                "-- COMMAND. "
                f"Received: {' '.join(arguments) or 'nothing'}"
            )
        if not values.grace_seconds < float("inf"):
            raise ConfigError(f"--grace_seconds must be 0 or more, and finite. Received: {values.grace_seconds}.")
        cluster, prefixes = network_namespaces.assign_namespaces(values.workers, values.ps, values.netns)
        launcher = Launcher(
            command,
            cluster,
            values.log_dir,
            prefixes=prefixes,
            grace_seconds=values.grace_seconds,
            max_restarts=values.max_restarts,
            fresh_ports=True,
        )
        return launcher.run()
    except flags.IllegalFlagValueError as e:
        print(
            printable_lines(e).replace("invalid literal for int() with base 10:", "expected a whole number. Received:"),
            file=sys.stderr,
        )
        return 2
    except (ConfigError, flags.Error) as e:
        hint = "" if "--" in arguments else " Write the command behind --: tfdist launch --workers=2 -- COMMAND."
        hint = hint if isinstance(e.__cause__, flags.UnrecognizedFlagError) else ""
        print(f"{printable_lines(e)}{hint}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `--help | head`
        raise
    except OSError as e:
        logger.error(f"cannot start the tasks: {e}")
        return 2


if __name__ == "__main__":
    interrupt.after_imports()
    sys.exit(interrupt.run_command(main, sys.argv))
