"""Checks whether this machine and environment can train, and prints a remedy for each problem. No TensorFlow in this process.

    tfdist doctor [--json] [--[no]devices]   # or python -m tfdist.doctor; exits with 1 if a problem would stop a run

`--no-devices` skips the check of devices, which loads TensorFlow and takes some seconds. Run the command on the machines that will train:
`srun -n 4 tfdist doctor`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.doctor import cluster, devices, machine, software
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, printable
from tfdist.errors import ConfigError, describe_error, encodable, printable_lines
from tfdist.runtime.log import print_always

Check = Callable[[Mapping[str, str]], Iterable[Finding]]

_LIMIT = 15.0  # seconds for each check; the checks run in parallel
_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
# The check and its limit in seconds, by subject, in the order of the table.
CHECKS: dict[str, tuple[Check, float]] = {
    "versions": (software.versions, _LIMIT),
    "processors and memory": (machine.resources, _LIMIT),
    "folders": (machine.folders, _LIMIT),
    "devices": (devices.check, 90.0),
    "CUDA_VISIBLE_DEVICES": (devices.visible, _LIMIT),
    "host name": (cluster.host_name, _LIMIT),
    "cluster": (cluster.check, _LIMIT),
    "settings": (software.settings, _LIMIT),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 0 if a run can start, 1 if a problem would stop it, 2 for an invalid command line."""
    print_always()
    values = command_line.new_flags()
    flags.DEFINE_bool("json", False, "Print JSON.", flag_values=values)
    flags.DEFINE_bool("devices", True, "Check the devices; this loads TensorFlow.", flag_values=values)
    try:
        if command_line.read_flags(values, argv)[1:]:
            raise ConfigError(f"Usage: tfdist doctor [--json] [--[no]devices]. Received: {' '.join(argv[1:])}")
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    if values.help:
        print(f"{__doc__}\n{command_line.help_text(values)}")
        return 0
    checks = {name: check for name, check in CHECKS.items() if name != "devices" or values.devices}
    try:
        findings = examine(checks, dict(os.environ))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    # mpirun gives its tasks a pseudo-terminal.
    in_terminal = bool(sys.stdout and sys.stdout.isatty()) and "OMPI_COMM_WORLD_SIZE" not in os.environ
    if values.json:
        text = as_json(findings)
    elif in_terminal:
        text = as_table(findings)
    else:
        text = as_lines(findings)
    print(encodable(text), flush=True)
    return 0 if is_ok(findings) else 1


def examine(checks: Mapping[str, tuple[Check, float]], environ: Mapping[str, str]) -> list[Finding]:
    """Returns the findings of all checks, in the order of `checks`.

    The checks run in parallel, and each has a time limit: a file system or a name server that hangs delays only its own check.

    Args:
        checks: For each subject, the check and its limit in seconds.
        environ: The environment.
    """
    by_check: dict[str, list[Finding]] = {name: [] for name in checks}

    def look(name: str, check: Check) -> None:
        try:
            for finding in check(environ):
                by_check[name].append(finding)
        except Exception as e:  # report it, so that the other findings are still shown
            problem = f"cannot be checked: {printable(describe_error(e))}"
            by_check[name].append(Finding(WARNING, name, problem, "see the other findings"))

    began = time.monotonic()
    threads = {
        name: threading.Thread(target=look, args=(name, check), daemon=True, name=f"tfdist-doctor-{name}")
        for name, (check, _) in checks.items()
    }
    for thread in threads.values():
        thread.start()
    findings: list[Finding] = []
    for name, (_, limit) in checks.items():
        threads[name].join(max(0.0, began + limit - time.monotonic()))
        findings += list(by_check[name])
        if threads[name].is_alive():
            remedy = "check whether a disk or name server hangs"
            findings.append(Finding(WARNING, name, f"no answer within {limit:.0f} s", remedy))
    return findings


def as_table(findings: Sequence[Finding]) -> str:
    """Returns the findings as a table that fits the terminal of standard output."""
    from rich import console, table, text

    shown = table.Table("", "what", table.Column("found", overflow="fold"), table.Column("do", overflow="fold"))
    for level, *parts in findings:
        shown.add_row(text.Text(level, style=_STYLES[level]), *map(text.Text, parts))
    terminal = console.Console(markup=False, emoji=False, highlight=False)
    with terminal.capture() as captured:
        terminal.print(shown)
    return captured.get() + _verdict(findings)


def as_lines(findings: Sequence[Finding]) -> str:
    """Returns one line per finding: `level  subject: value -> remedy`."""
    width = max(map(len, _STYLES))
    lines = []
    for level, what, value, do in findings:
        line = f"{level:{width}}  {what}: {value}"
        if do:
            line += f" -> {do}"
        lines.append(line)
    return "\n".join([*lines, _verdict(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """Returns one JSON object: `ok`, false if any finding is an error, and the list `findings`."""
    return json.dumps({"ok": is_ok(findings), "findings": [finding._asdict() for finding in findings]}, indent=1)


def _verdict(findings: Sequence[Finding]) -> str:
    counts = []
    for level in (ERROR, WARNING, NOTE):
        count = sum(finding.level == level for finding in findings)
        plural = "" if count == 1 else "s"
        counts.append(f"{count} {level}{plural}")
    verdict = "OK" if is_ok(findings) else "NOT OK"
    return f"{verdict}: {', '.join(counts)}"


def is_ok(findings: Sequence[Finding]) -> bool:
    """Returns True if no finding is an error, so that a run can start."""
    return all(finding.level != ERROR for finding in findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
