"""Starts, watches, restarts and ends the tasks of a cluster on this machine, or on each of several. No TensorFlow here.

    tfdist launch --workers=2 --max-restarts=3 python script.py --its --flags   # or: python -m tfdist.launch
    tfdist launch --workers=1:4 -- python script.py                             # continues with fewer workers after a loss
    tfdist launch --hosts=a,b -- python script.py                               # the same on a and on b
    tfdist launch --ray --workers=2:8 -- python script.py                       # on the nodes of a Ray cluster

Flags of tfdist launch come before the command; the -- between them is optional. Every task gets its own TF_CONFIG. The launcher
prints each task's output after the task's name, and writes it to `LOG_DIR/<task>.log`. It reports the first task that fails with
the reason, and then ends all tasks or restarts them. No process survives, even after kill -9: each task leads a process group, and
a guardian process kills the groups when the launcher ends.

With --hosts or --hostfile the launcher starts the tasks of its host, which it recognizes by the host's addresses. The hosts share
only the network. Each launcher restarts its own tasks, so give the same --max_restarts to all of them.

With --ray each worker has a place on a Ray cluster, and only this launcher runs here (docs/ray.md).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from tfdist.cluster import local_cluster
from tfdist.cluster.resolvers import discovery, hosts
from tfdist.config import cluster as cluster_lib
from tfdist.config import command_line
from tfdist.config.constraints import MOST_SECONDS, MOST_TASKS
from tfdist.errors import ClusterError, ConfigError, collect_errors, format_value, printable_lines
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.launch.sizes import JOIN_SECONDS, Sizes
from tfdist.ray.connection import ray_host
from tfdist.runtime.end import process_end
from tfdist.runtime.log import logger, print_always

_OF_RAY = ("cpus_per_worker", "gpus_per_worker")
_OF_HOSTS = (*cluster_lib.FLAGS, "workers_per_host")
# Flags of a cluster on this machine, with the remedy for a cluster of hosts.
_OF_THIS_MACHINE = {
    "workers": "each host gets --workers_per_host=N tasks, 1 by default",
    "ps": "name the hosts of the parameter servers: --ps_hosts=c,d",
}


def main(argv: Sequence[str]) -> int:
    """Runs `tfdist launch`; returns the exit code of `Launcher.run`, or 2 for an invalid command line."""
    print_always()
    values = _flags()
    try:
        command = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        launcher = _launcher(values, command)
        return launcher.run()
    except ClusterError as e:
        logger.error(e)
        return 1
    except (ConfigError, flags.Error) as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `--help | head`
        raise
    except OSError as e:
        logger.error(f"cannot start the tasks: {e}")
        return 2


def _flags() -> flags.FlagValues:
    values = command_line.new_flags()
    values.set_gnu_getopt(False)  # flags after the command belong to the command
    at_least = {"flag_values": values, "lower_bound": 0}
    flags.DEFINE_string(
        "workers",
        "1",
        "Number of training tasks on this machine. MIN:MAX, as 1:4, starts MAX and continues with fewer after a task was killed.",
        short_name="n",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "ps", 0, "Number of parameter servers on this machine; a chief is added.", 0, MOST_TASKS, flag_values=values
    )
    texts = {
        **cluster_lib.FLAGS,
        "task": "The tasks to start here, as worker:1 or worker:2,worker:3. Default: this host's.",
    }
    texts["hosts"] = "Hosts of one training, each once, as a,b or a:2222,b:2222; run the same command on each host."
    for name, text in texts.items():
        flags.DEFINE_string(name, "", text, flag_values=values)
    flags.DEFINE_integer(
        "workers_per_host",
        None,
        "Number of training tasks of each host of --hosts, at consecutive ports. Default: 1, or the slots of --hostfile.",
        lower_bound=1,
        upper_bound=MOST_TASKS,
        flag_values=values,
    )
    flags.DEFINE_string("nnodes", None, "Removed: an elastic job on several hosts runs on Ray.", flag_values=values)
    flags.DEFINE_string("log_dir", "logs", "Folder for each task's full output.", flag_values=values)
    flags.DEFINE_float("grace_seconds", 25.0, "Seconds from a signal to SIGKILL.", **at_least)
    flags.DEFINE_integer("max_restarts", 0, "Number of restarts after failures.", **at_least)
    flags.DEFINE_integer(
        "warm",
        1,
        "0: start each task as a new process, not by a fork of a process that has imported TensorFlow.",
        0,
        1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "replicas", 0, "Number of replicas of all workers of an elastic job. Default: MAX.", **at_least
    )
    _define_ray(values)
    join = (
        "Seconds after a loss in which an elastic job starts again with as many workers, while restarts are left; with --ray, "
        "seconds for which a start waits for nodes."
    )
    flags.DEFINE_float("join_seconds", JOIN_SECONDS, join, **at_least)
    flags.DEFINE_string(
        "stdin",
        "",
        "The task that reads the standard input of this command, as worker:0: for breakpoint() and input(), which fail in other tasks.",
        flag_values=values,
    )
    return values


class _AddressParser(flags.ArgumentParser):
    def parse(self, argument: str) -> str:
        """Returns the address; a flag without a value has `true`."""
        return {"true": "auto", "false": ""}.get(argument, argument)


def _define_ray(values: flags.FlagValues) -> None:
    text = "Start the workers on the Ray cluster of the environment, or, as --ray=HOST:6379, of an address."
    # For a boolean flag absl reads no value from the next word.
    flags.DEFINE_flag(flags.Flag(_AddressParser(), None, "ray", "", text, boolean=True), flag_values=values)
    for name in ("CPU", "GPU"):
        flags.DEFINE_float(
            f"{name.lower()}s_per_worker",
            float(name == "CPU"),
            f"{name}s that each worker takes from the Ray cluster.",
            lower_bound=0,
            flag_values=values,
        )


def _launcher(values: flags.FlagValues, command: Sequence[str]) -> Launcher:
    """Returns the launcher of a command line.

    Raises:
        ConfigError: The command line is invalid; the error lists every problem.
    """
    if values["nnodes"].present:
        raise ConfigError(
            "--nnodes is removed: for an elastic job on several hosts, start a Ray cluster and give --ray, as in "
            "tfdist launch --ray=ADDRESS --workers=2:8 -- python script.py."
        )
    faults = list(_faults(values, command))
    limits: dict[str, Any] = {"grace_seconds": values.grace_seconds, "max_restarts": values.max_restarts}
    has_hosts = values["hosts"].present or values["hostfile"].present
    if faults and not has_hosts:
        raise ConfigError(faults)
    with collect_errors(faults):
        if has_hosts:
            cluster, here = hosts.local_tasks(**{name: values[name].value for name in _OF_HOSTS})
        else:
            workers = cluster_lib.worker_range(values.workers, "--workers")
            cluster, here = local_cluster(workers.most, values.ps), None
            limits["warm"] = values.warm > 0 and not values.ray
            if workers.is_elastic:
                limits["sizes"] = Sizes(*workers, values.replicas, values.join_seconds)
        if values.stdin:
            limits["stdin"] = hosts.parse_task(cluster, values.stdin, "--stdin")
        if not values.ray:
            discovery.check_gpus(cluster, here)
        if not faults:
            _make_log_dir(values.log_dir)
            options = Options(command, cluster, values.log_dir, fresh_ports=not has_hosts, here=here, **limits)
            if values.ray:
                resources = {"CPU": values.cpus_per_worker, "GPU": values.gpus_per_worker}
                return Launcher(options, host=ray_host(values.ray, resources, values.join_seconds, values.warm > 0))
            return Launcher(options)
    raise ConfigError(faults)


def _faults(values: flags.FlagValues, command: Sequence[str]) -> Iterator[str]:
    """Yields the errors in a command line, except in the list of hosts itself."""
    if not command:
        yield (
            "Usage: tfdist launch [--workers=N or MIN:MAX] [--ps=N] [--log_dir=DIR] [--grace_seconds=S] [--max_restarts=N] [--warm=0] "
            "[--stdin=TASK] [--] COMMAND, or tfdist launch --hosts=A,B [--ps_hosts=C] [--workers_per_host=N] [--] COMMAND. "
            "The command is missing."
        )
    elif not shutil.which(command[0]):
        yield f"the command {format_value(command[0])} cannot be run; {_why_not_run(command[0])}"
    for name in ("grace_seconds", "join_seconds"):
        if not values[name].value <= MOST_SECONDS:
            yield f"--{name} must be 0 to {MOST_SECONDS}. Received: {values[name].value}."
    try:
        workers = cluster_lib.worker_range(values.workers, "--workers")
    except ConfigError as e:
        yield from e.faults
    else:
        yield from _elastic_faults(values, workers)
    yield from _ray_faults(values)
    several = [name for name in ("hosts", "hostfile") if values[name].present]
    for name, remedy in _OF_THIS_MACHINE.items():
        if several and values[name].present:
            yield f"--{several[0]} and --{name} exclude each other: leave out --{name}; {remedy}."
    unsuited = [f"--{name}" for name in _OF_HOSTS if values[name].present]
    if unsuited and not several:
        yield f"{', '.join(unsuited)}: only with --hosts=A,B or --hostfile=FILE, which name all hosts of the training."


def _ray_faults(values: flags.FlagValues) -> Iterator[str]:
    if not values.ray:
        unsuited = [f"--{name}" for name in _OF_RAY if values[name].present]
        if unsuited:
            yield f"{', '.join(unsuited)}: only for a Ray cluster; add --ray, or leave it out."
        return
    for name in ("ps", "hosts", "hostfile", "stdin"):
        if values[name].present:
            yield f"--ray and --{name} exclude each other: leave one of them out."


def _elastic_faults(values: flags.FlagValues, workers: cluster_lib.WorkerRange) -> Iterator[str]:
    if not workers.is_elastic:
        unsuited = [f"--{name}" for name in ("replicas", "join_seconds") if values[name].present]
        if unsuited and not (values.ray and not values.replicas):
            yield f"{', '.join(unsuited)}: only for an elastic job; leave it out, or give a range, such as --workers=1:4."
    elif values.ps:
        yield (
            f"--workers={values.workers} is for synchronous workers. With --ps a lost worker starts again alone, and the others train on: "
            "give one number, and --max_restarts."
        )
    elif values.replicas and not 1 <= workers.most <= values.replicas:
        yield f"--replicas must be at least the largest number of workers, {workers.most}. Received: {values.replicas}."
    elif values.replicas % workers.most:
        yield f"--replicas must be a multiple of the largest number of workers, {workers.most}. Received: {values.replicas}."


def _make_log_dir(path: str) -> None:
    try:
        os.makedirs(path or ".", exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"--log_dir must be a folder that can be written to. Received: {format_value(path)} ({why})."
        ) from None


def _why_not_run(program: str) -> str:
    if program.endswith(".py"):
        return f"a script needs its interpreter: python {program}"
    if os.path.isdir(program):
        return "it is a folder."
    if os.path.dirname(program) and os.path.exists(program):
        return f"it is not executable: chmod +x {shlex.quote(program)}"
    return "is it installed?"


if __name__ == "__main__":
    process_end.after_imports()
    sys.exit(process_end.run_command(main, sys.argv))
