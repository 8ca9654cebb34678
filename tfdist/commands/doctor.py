"""Checks whether this machine and environment can train, and prints a remedy for each problem. No TensorFlow in this process.

    tfdist doctor [--[no]devices]   # or python -m tfdist.doctor; exits with 1 if a problem would stop a run

`--no-devices` skips the check of devices, which loads TensorFlow and takes some seconds. Run the command on the machines that will train:
`srun -n 4 tfdist doctor`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.doctor import checks
from tfdist.errors import ConfigError, encodable, printable_lines
from tfdist.runtime.log import print_always


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 0 if a run can start, 1 if a problem would stop it, 2 for an invalid command line."""
    print_always()
    values = command_line.new_flags()
    flags.DEFINE_bool("devices", True, "Check the devices; this loads TensorFlow.", flag_values=values)
    try:
        if command_line.read_flags(values, argv)[1:]:
            raise ConfigError(f"Usage: tfdist doctor [--[no]devices]. Received: {' '.join(argv[1:])}")
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    if values.help:
        print(f"{__doc__}\n{command_line.help_text(values)}")
        return 0
    counts = dict.fromkeys((checks.ERROR, checks.WARNING, checks.NOTE, checks.OK), 0)
    try:
        for check in (checks.versions, checks.devices, checks.shared_memory, checks.cluster):
            if check is checks.devices and not values.devices:
                continue
            for level, what, value, remedy in check(dict(os.environ)):
                counts[level] += 1
                print(encodable(f"{level:7}  {what}: {value}{remedy and f' -> {remedy}'}"), flush=True)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    verdict = "NOT OK" if counts[checks.ERROR] else "OK"
    counted = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in [*counts][:3]]
    print(f"{verdict}: {', '.join(counted)}", flush=True)
    return int(bool(counts[checks.ERROR]))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
