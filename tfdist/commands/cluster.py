"""Shows and checks the cluster that a training on this host would use, and writes jobs for schedulers. No TensorFlow here.

    tfdist cluster show [--format=table|json|env|shell]
    tfdist cluster check [--connect] [--strategy=parameter_server]   # exit code 2 if the cluster is invalid
    tfdist cluster emit --target=slurm|kubernetes|trainjob --config=FILE --workdir=DIR [flags of tfdist train]

`python -m tfdist.cluster` is the same command.
`tfdist/cluster/resolvers/discovery.py` lists the sources of a cluster, in the order of lookup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence

from absl import flags

from tfdist.cluster import greeting, preflight
from tfdist.cluster.jobs import job as job_lib
from tfdist.cluster.jobs import kubernetes, slurm
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import ClusterSpec, TaskSpec
from tfdist.cluster.validation import parameter_server_faults
from tfdist.config import STRATEGIES, command_line, field_help
from tfdist.config import cluster as cluster_lib
from tfdist.config import flags as flags_lib
from tfdist.errors import ClusterError, ConfigError, printable_lines, truncate, unknown_name_message
from tfdist.runtime.end import process_end
from tfdist.runtime.log import TO_STDERR, logger, print_always

COMMANDS = ("show", "check", "emit")
FORMATS = ("table", "json", "env", "shell")
TARGETS = {"slurm": slurm.script, "kubernetes": kubernetes.manifests, "trainjob": kubernetes.train_job}
# Flags of jobs that a target does not read.
_NOT_OF = {"slurm": ("image", "claim"), "kubernetes": ("time", "notice"), "trainjob": ("time", "notice")}
_LINGER = 5.0  # seconds
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 2 if the cluster or the command line is invalid, 1 if a task cannot be reached."""
    print_always()
    values = _flags()
    try:
        words = command_line.read_flags(values, argv, known_only=True)[1:]
        if not 0 <= values.timeout < float("inf"):
            raise ConfigError(f"--timeout must be 0 or more seconds, and finite. Received: {values.timeout}.")
        command = next(iter(words), "")
        arguments = words[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if command == "emit":
            return _emit(values, arguments)
        wrong = [word for word in words if word.startswith("-")]
        if wrong:
            raise command_line.unknown_flag(wrong[0].partition("=")[0], values)
        if command and command not in COMMANDS:
            raise ConfigError(unknown_name_message("command", command, COMMANDS))
        if not command or arguments:
            raise ConfigError(
                f"Usage: tfdist cluster show|check|emit, with the flags that --help lists. "
                f"Received: {' '.join(argv[1:]) or 'nothing'}"
            )
        resolved = discovery.resolve(
            source=values.source,
            ps=values.ps,
            timeout=values.timeout,
            **{name: values[name].value for name in cluster_lib.FLAGS},
        )
        if values.strategy:
            jobs = resolved.cluster.jobs if resolved else {}
            faults = list(parameter_server_faults(jobs))
            if faults:
                raise ConfigError(faults)
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    except ClusterError as e:
        print(printable_lines(e), file=sys.stderr)
        return 1
    if resolved is None:
        hint = discovery.misconfiguration_hint()
        if hint:
            logger.warning(hint, extra=TO_STDERR)
    if command == "show":
        print(show(resolved, values.format))
        return 0
    if resolved is None:
        print("OK: no cluster in the environment")
        return 0
    described = f"{resolved.task} of {len(resolved.cluster.tasks())} tasks"
    if values.connect:
        print(described, flush=True)
        return _connect(resolved.cluster, resolved.task, values.timeout)
    print(f"OK: {described}")
    return 0


def _flags() -> flags.FlagValues:
    values = command_line.new_flags()
    style = "How `show` prints: a table, JSON, or variables for a file (env) or for `eval` (shell)."
    flags.DEFINE_enum("format", "table", FORMATS, style, flag_values=values)
    # Other strategies train in any cluster, or without a cluster.
    suited = [name for name, traits in STRATEGIES.items() if traits.asynchronous]
    text = "For `check`: a strategy whose tasks the cluster must have."
    flags.DEFINE_enum("strategy", None, suited, text, flag_values=values)
    sources = f"auto, none, {', '.join(discovery.RESOLVERS)}, or the name of an installed resolver"
    flags.DEFINE_string("source", "auto", f"The resolver of the cluster: {sources}.", flag_values=values)
    text = "Number of parameter servers, if the environment has ranks without roles: the last ranks are servers."
    flags.DEFINE_integer("ps", 0, text, lower_bound=0, flag_values=values)
    for name, text in cluster_lib.FLAGS.items():
        flags.DEFINE_string(name, "", text, flag_values=values)
    text = "For `check`: try this task's port, and the names and ports of all other tasks. Run it in all tasks at once."
    flags.DEFINE_bool("connect", False, text, flag_values=values)
    flags.DEFINE_float(
        "timeout", 30.0, "Seconds for which `check --connect` waits for the other tasks.", flag_values=values
    )
    flags.DEFINE_enum(
        "target", "slurm", list(TARGETS), "The scheduler that `emit` writes a job for.", flag_values=values
    )
    about = field_help.attribute_texts(job_lib.Job)
    for field in dataclasses.fields(job_lib.Job):
        define = flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_string
        define(field.name, field.default, f"For `emit`: {about[field.name]}", flag_values=values)
    return values


def show(resolved: ResolvedCluster | None, style: str) -> str:
    """Returns a cluster as text, in one of `FORMATS`."""
    if resolved is None:
        return {
            "json": json.dumps({"source": None, "cluster": None, "task": None}),
            "table": "No cluster in the environment: one process on this machine. "
            f"(Not set: {', '.join(discovery.signals())}.)",
        }.get(style, "")
    cluster = resolved.cluster
    task = resolved.task
    environ = {"TF_CONFIG": cluster.to_tf_config(task), **resolved.environ}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
    if style == "env":
        return "\n".join(assignments)
    if style == "shell":
        return "\n".join(f"export {assignment}" for assignment in assignments)
    if style == "json":
        described = {
            "source": resolved.source,
            "variables": resolved.variables,
            "cluster": cluster.jobs,
            "task": dataclasses.asdict(task),
            "chief": str(cluster.chief),
            "environ": resolved.environ,
        }
        return json.dumps(described)
    rows = [("task", "address", "")]
    for member in cluster.tasks():
        roles = []
        if member == cluster.chief:
            roles.append("chief")
        if member == task:
            roles.append("this process")
        rows.append((str(member), truncate(cluster.address(member)), ", ".join(roles)))
    if task.type == "evaluator":
        rows.append((str(task), "outside of the cluster", "this process"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    read = [f"  {name}={truncate(value)}" for name, value in resolved.variables.items()]
    sets = [f"and sets {name}={truncate(value)}" for name, value in resolved.environ.items()]
    return "\n".join([f"from {resolved.source}", *read, *table, *sets])


def _connect(cluster: ClusterSpec, task: TaskSpec, timeout: float) -> int:
    """Checks this task's port and the peers' names and ports; prints the result and returns the exit code."""
    proxies = {name: value for name, value in os.environ.items() if name.lower() in _PROXIES and value}
    # Omit the user's name and password, which may precede the host.
    named = ", ".join(f"{name}={value.rpartition('@')[2]}" for name, value in proxies.items())
    print(f"proxies: {named or 'none'}; the cluster bypasses them")
    try:
        listening: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if task in cluster.tasks():  # an evaluator has no port there
            listening = greeting.listening_for_peers(cluster, task)
        with listening:
            began = time.monotonic()
            preflight.wait_until_reachable(cluster, [other for other in cluster.tasks() if other != task], timeout)
            # Others may still try to reach this task.
            time.sleep(min(_LINGER, max(0.0, began + timeout - time.monotonic())))
    except ClusterError as e:
        print(printable_lines(e), file=sys.stderr)
        return 1
    print("OK: all tasks can be reached")
    return 0


def _emit(values: flags.FlagValues, arguments: list[str]) -> int:
    """Prints the job that runs `tfdist train` with these flags."""
    unsuited = [name for name in ("ps", "source", "strategy", "connect", *cluster_lib.FLAGS) if values[name].present]
    if unsuited:
        raise ConfigError(
            f"{', '.join(f'--{name}' for name in unsuited)}: not for emit, which reads the number of tasks from the configuration: "
            "--config.cluster.workers=4, --config.cluster.ps=1."
        )
    for name in _NOT_OF.get(values.target, ()):
        if values[name].present:
            raise ConfigError(f"--{name} has no meaning for --target={values.target}; leave it out.")
    of_job = [field.name for field in dataclasses.fields(job_lib.Job)]
    parsed = flags_lib.parse(["tfdist train", *arguments], __doc__, ["target", *of_job])
    if parsed is None:
        return 0
    job = job_lib.Job(**{name: values[name].value for name in of_job})
    print(TARGETS[values.target](*parsed, arguments, job), end="")
    return 0


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
