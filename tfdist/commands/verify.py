"""Compares the training of a script on one device with the same training on several, and says whether they are equal.

    tfdist verify -- python script.py --its --flags              # 2 workers and one device, 20 updates
    tfdist verify --devices=2 -- python script.py
    tfdist verify --workers=2 --compression=powersgd -- python script.py
    tfdist verify --config=digits --workers=2                    # a training of tfdist train

The script runs unchanged, in temporary copies of the current folder: A on one device, B again in another process, C under the wished
strategy, and D as C, killed at an update and resumed. Each fit ends after --steps updates. The result is a table, verify.json and
verify.md. Exit code 0 means equal, 1 that something differs, 2 that an arm did not run. docs/verify.md explains the verdicts.

`python -m tfdist.commands.verify` is the same command.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from absl import flags

from tfdist.cluster import local_cluster
from tfdist.cluster.resolvers import discovery
from tfdist.config import command_line, registry, relations
from tfdist.config.compression import COMPRESSORS
from tfdist.config.constraints import MOST_SECONDS, MOST_STEPS
from tfdist.errors import ConfigError, encodable, format_value, printable_lines, unknown_name_message
from tfdist.runtime.end import process_end
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.log import print_always
from tfdist.verify import arms
from tfdist.verify.arms import DidNotRunError, Plan
from tfdist.verify.report import DID_NOT_RUN_CODE, Report

_MOST = 64
_FILES = ("verify.json", "verify.md")


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns 0 if the arms are equal, 1 if they differ, 2 if an arm did not run or the command line is invalid."""
    print_always()
    values = _flags()
    try:
        command = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        faults = list(_faults(values, command))
        if faults:
            raise ConfigError(faults)
        plan = _plan(values, command)
        discovery.check_gpus(local_cluster(plan.workers, plan.ps))
        _make_folder(values.out)
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return DID_NOT_RUN_CODE
    letters = values.arms.upper().replace(",", "")
    try:
        report = _verify(plan, letters, 60 * values.minutes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(encodable(report.as_text()))
    if report.arms:
        report.write(values.out)
        print(f"written: {' and '.join(os.path.join(values.out, name) for name in _FILES)}")
    return report.exit_code


def _flags() -> flags.FlagValues:
    values = command_line.new_flags()
    values.set_gnu_getopt(False)  # flags after the command belong to the command
    counts = {"flag_values": values, "lower_bound": 0, "upper_bound": _MOST}
    flags.DEFINE_integer(
        "workers",
        None,
        "Workers of the wished strategy. Default: 2, or 1 with --devices.",
        1,
        _MOST,
        flag_values=values,
    )
    flags.DEFINE_integer("devices", 0, "Virtual CPUs of each worker. Default: as the script says.", **counts)
    flags.DEFINE_integer("ps", 0, "Parameter servers.", **counts)
    flags.DEFINE_string(
        "compression", "", "The compression of gradients. Default: as the script says.", flag_values=values
    )
    flags.DEFINE_bool("shard_optimizer", False, "Split the optimizer's state among the workers.", flag_values=values)
    flags.DEFINE_integer("steps", 20, "Updates of each arm.", 1, MOST_STEPS, flag_values=values)
    flags.DEFINE_string("arms", "A,B,C,D", "The arms to run; A always runs.", flag_values=values)
    flags.DEFINE_float("minutes", 5.0, "Minutes for all arms.", lower_bound=0, flag_values=values)
    flags.DEFINE_integer(
        "seed", 0, "The random seed, if the script sets none, and that of the kill.", 0, MOST_STEPS, flag_values=values
    )
    flags.DEFINE_string("config", "", "A configuration of tfdist train, in place of a command.", flag_values=values)
    flags.DEFINE_string("out", ".", "The folder of verify.json and verify.md.", flag_values=values)
    return values


def _faults(values: flags.FlagValues, command: Sequence[str]) -> Iterator[str]:
    """Yields the errors in a command line."""
    if not command and not values.config:
        yield "Usage: tfdist verify [FLAGS] [--] COMMAND, or tfdist verify --config=CONFIG [FLAGS]. The command is missing."
    elif command and not values.config and not shutil.which(command[0]):
        yield f"the command {format_value(command[0])} cannot be run; give the interpreter of a script: python {command[0]}"
    unknown = set(values.arms.upper().replace(",", "")) - set(arms.NAMES)
    if unknown:
        yield f"--arms must name some of A, B, C and D. Received: {format_value(values.arms)}."
    if values.ps:
        options = {option: f"--{option}" for option in ("shard_optimizer", "compression") if values[option].value}
        yield from relations.faults({"not_mirrors": "--ps", "not_compressing": "--ps", **options})
    if not 60 * values.minutes <= MOST_SECONDS:
        yield f"--minutes must be 0 to {MOST_SECONDS // 60}. Received: {values.minutes}."
    known = {*COMPRESSORS, *registry.find_plugins("compression", COMPRESSORS)}
    if ":" in values.compression:
        registry.check_findable("compression", values.compression)
    elif values.compression and values.compression not in known:
        yield unknown_name_message("--compression", values.compression, known)


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path or ".", exist_ok=True)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"--out must be a folder that can be written to. Received: {format_value(path)} ({e})."
        ) from None


def _workers(values: flags.FlagValues) -> int:
    if values.workers is not None:
        return int(values.workers)
    return 1 if values.devices or values.ps else 2


def _plan(values: flags.FlagValues, command: Sequence[str]) -> Plan:
    words = list(command)
    if values.config:
        # The arms set the cluster; the work directory is in the arm's own folder.
        train = [sys.executable, "-m", "tfdist.train", f"--config={values.config}", "--workdir=verify-workdir"]
        words = [*train, "--config.cluster.workers=1", "--config.cluster.ps=0", *words]
    program = shutil.which(words[0]) or words[0]
    # A path that leaves the current folder would lead elsewhere from the folder of an arm.
    rest = [os.path.abspath(word) if word.startswith("..") and os.path.exists(word) else word for word in words[1:]]
    return Plan(
        [os.path.abspath(program), *rest],
        _workers(values),
        values.devices,
        values.ps,
        values.compression,
        values.shard_optimizer,
        values.steps,
        values.seed,
    )


def _verify(plan: Plan, letters: str, seconds: float) -> Report:
    """Runs the arms until one fails. Raises KeyboardInterrupt after Ctrl-C."""
    report = Report(plan)
    until = time.monotonic() + seconds
    with temporary_folder() as folder:
        for arm in arms.NAMES:
            # A resume under parameter servers repeats no order of updates.
            if arm not in f"A{letters}" or (arm == "D" and (plan.ps or "C" not in report.arms)):
                continue
            began = time.monotonic()
            updates = max(report.arms["C"].first, default=0) if arm == "D" else 0
            try:
                report.arms[arm] = arms.run(plan, arm, folder, until - began, updates)
            except DidNotRunError as e:
                report.failure = str(e)
                if e.arm:  # its records may show why it has failed
                    report.arms[arm] = e.arm
                    report.seconds[arm] = time.monotonic() - began
                return report
            report.seconds[arm] = time.monotonic() - began
            what = plan.name if arm == "C" else arms.NAMES[arm]
            print(f"{arm}: {what}, {len(report.arms[arm].first)} updates, {report.seconds[arm]:.0f} s", flush=True)
    return report


if __name__ == "__main__":
    process_end.after_imports()
    sys.exit(process_end.run_command(main, sys.argv))
