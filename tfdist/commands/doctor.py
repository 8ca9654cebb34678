"""Checks what this machine and environment offer a training, with a remedy for each problem. No TensorFlow in this process.

    tfdist doctor [--json] [--[no]devices]   # the same: python -m tfdist.doctor; exit code 1 where something would stop a run

`--no-devices` skips the devices, for which TensorFlow must be loaded, which takes some seconds. Run it where the training will
run: `srun -n 4 tfdist doctor`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.doctor import cluster, devices, folders, report, resources, settings, versions
from tfdist.errors import ConfigError, printable_lines
from tfdist.runtime.log import print_always

_LIMIT = 15.0  # seconds for each check; they run beside each other
# By subject, in the order of the table: the check, and the seconds that it may take.
CHECKS: dict[str, tuple[report.Check, float]] = {
    "versions": (versions.check, _LIMIT),
    "processors and memory": (resources.check, _LIMIT),
    "folders": (folders.check, _LIMIT),
    "devices": (devices.check, 90.0),
    "CUDA_VISIBLE_DEVICES": (devices.visible, _LIMIT),
    "host name": (cluster.host_name, _LIMIT),
    "cluster": (cluster.check, _LIMIT),
    "settings": (settings.check, _LIMIT),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 where something would stop a run, 2 for a faulty command line."""
    print_always()
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    flags.DEFINE_bool("json", False, "Print JSON.", flag_values=values)
    flags.DEFINE_bool("devices", True, "Check the devices, for which TensorFlow is loaded.", flag_values=values)
    try:
        if command_line.read_flags(values, argv)[1:]:
            raise ConfigError(f"Usage: tfdist doctor [--json] [--[no]devices]. Received: {' '.join(argv[1:])}")
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    if values.help:
        print(f"{__doc__}\n{command_line.help_text(values)}")
        return 0
    checks = {name: each for name, each in CHECKS.items() if name != "devices" or values.devices}
    try:
        findings = report.examine(checks, dict(os.environ))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if values.json:
        print(report.as_json(findings))
        return 0 if report.is_ok(findings) else 1
    # mpirun gives its tasks a pseudo-terminal.
    in_terminal = bool(sys.stdout and sys.stdout.isatty()) and "OMPI_COMM_WORLD_SIZE" not in os.environ
    text = report.as_table(findings) if in_terminal else report.as_lines(findings)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    return 0 if report.is_ok(findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
