"""Starts the tasks of a cluster as `tfdist launch` does, each on a host of a laboratory.

    python -m tools.netlab --hosts=2 --rate=100mbit -- python -m tools.netlab.launch --workers=2 -- python script.py

The tasks take the hosts in turn. `--netns` names the hosts' network namespaces by name or path; default: TFDIST_NETNS, which
`python -m tools.netlab` sets. Each host gets an equal share of the cores. The further flags are those of `tfdist launch`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfdist.cluster import ClusterSpec, TaskSpec, local_cluster
from tfdist.cluster.spec import split_address
from tfdist.errors import ConfigError, format_value, printable_lines
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.runtime.end import process_end
from tfdist.runtime.log import print_always

VARIABLE = "TFDIST_NETNS"


@dataclasses.dataclass(frozen=True)
class Namespace:
    """A network namespace.

    Attributes:
        path: The file by which it is entered.
        address: Its IPv4 address.
        cores: Which of the machine's cores are its own.
    """

    path: str
    address: str
    cores: Sequence[int]

    def command_prefix(self) -> list[str]:
        """Returns the words that run a command there."""
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores)), "nsenter", f"--net={self.path}"]


def assign_namespaces(workers: int, ps: int, netns: str) -> tuple[ClusterSpec, Mapping[TaskSpec, Sequence[str]]]:
    """Returns a cluster of this machine, and for each task the words that go before its command.

    Args:
        workers: As for `local_cluster`.
        ps: As for `local_cluster`.
        netns: Namespaces by name or path, between commas.

    Raises:
        ConfigError: With every fault of them.
    """
    names = [each.strip() for each in netns.split(",") if each.strip()]
    if not names:
        raise ConfigError(f"netns must name network namespaces, between commas. Received: {format_value(netns)}.")
    spaces = _find(names)
    local = local_cluster(workers, ps)
    turns = {task: spaces[number % len(spaces)] for number, task in enumerate(local.tasks())}
    ports = {task: split_address(local.address(task))[1] for task in turns}
    cluster = ClusterSpec(
        {
            job: [f"{turns[TaskSpec(job, i)].address}:{ports[TaskSpec(job, i)]}" for i in range(len(addresses))]
            for job, addresses in local.jobs.items()
        }
    )
    return cluster, {task: space.command_prefix() for task, space in turns.items()}


def cores_for(number: int, count: int, cores: Sequence[int]) -> list[int]:
    """Returns the cores of one of several namespaces, so that all have as much.

    Args:
        number: Which of them, from 0.
        count: How many there are.
        cores: The machine's.
    """
    if count > len(cores) and count % len(cores):
        return list(cores)  # the system shares them out
    own = max(1, len(cores) // count)
    return [cores[(number * own + each) % len(cores)] for each in range(own)]


def _find(names: Sequence[str]) -> list[Namespace]:
    if missing := [tool for tool in ("nsenter", "taskset", "ip") if not shutil.which(tool)]:
        raise ConfigError(f"netns needs {', '.join(missing)}, of util-linux and iproute2.")
    cores = sorted(os.sched_getaffinity(0))
    found: list[Namespace] = []
    faults: list[str] = []
    for number, name in enumerate(names):
        path = name if "/" in name else f"/run/netns/{name}"
        asked = subprocess.run(
            ["nsenter", f"--net={path}", "ip", "-4", "-oneline", "address", "show", "scope", "global"],
            capture_output=True,
            text=True,
        )
        words = asked.stdout.split()
        if asked.returncode or "inet" not in words:
            why = asked.stderr.strip() or "it has no IPv4 address"
            faults.append(f"netns: {format_value(name)} cannot be used: {why}")
            continue
        found.append(
            Namespace(path, words[words.index("inet") + 1].partition("/")[0], cores_for(number, len(names), cores))
        )
    if faults:
        raise ConfigError(faults)
    return found


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: of `Launcher.run`, or 2 for a faulty command line."""
    print_always()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netns", default=os.environ.get(VARIABLE, ""))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ps", type=int, default=0)
    parser.add_argument("--log_dir", default="logs")
    parser.add_argument("--grace_seconds", type=float, default=25.0)
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv[1:])
    try:
        cluster, prefixes = assign_namespaces(args.workers, args.ps, args.netns)
    except ConfigError as e:
        print(printable_lines(e), file=sys.stderr)
        return 2
    os.makedirs(args.log_dir, exist_ok=True)
    limits = {"grace_seconds": args.grace_seconds, "max_restarts": args.max_restarts}
    return Launcher(Options(args.command, cluster, args.log_dir, prefixes=prefixes, fresh_ports=True, **limits)).run()


if __name__ == "__main__":
    process_end.after_imports()
    sys.exit(process_end.run_command(main, sys.argv))
