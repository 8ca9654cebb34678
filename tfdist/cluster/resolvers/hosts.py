"""A cluster from a list of hosts or a hostfile. No TensorFlow here."""

from __future__ import annotations

import collections
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.cluster.resolvers.environment import PORT, assign_roles
from tfdist.cluster.spec import ClusterSpec, ClusterTask, TaskSpec, split_address
from tfdist.cluster.validation import MOST_TASKS, is_index
from tfdist.errors import ConfigError, format_value, list_first
from tfdist.runtime.files import read_file


def cluster(hosts: str = "", ps_hosts: str = "", hostfile: str = "", task: str = "", ps: int = 0) -> ClusterTask:
    """Returns a cluster of hosts, and this process's task.

    Args:
        hosts: The addresses of the training tasks, separated by commas. Addresses of a host without a port get 2222, 2223 and
            so on.
        ps_hosts: The addresses of the parameter servers; the first of `hosts` is then the chief.
        hostfile: The path of a file instead of `hosts`, in mpirun's format: a line `host slots=2` for each host; `#` begins a
            comment.
        task: This process's task, such as `worker:1`. Empty means the task whose address is this host's.
        ps: Without `ps_hosts`: how many of the last addresses are parameter servers.

    Raises:
        ConfigError: An argument is invalid (all errors are listed), or `task` is empty and this host has no task or several.
    """
    spec = _cluster(_training_hosts(hosts, hostfile), _split(ps_hosts), ps)
    return ClusterTask(spec, parse_task(spec, task) if task else _task_of_this_host(spec))


class LocalTasks(NamedTuple):
    """A cluster of hosts, and its tasks that run on this host."""

    cluster: ClusterSpec
    tasks: Sequence[TaskSpec]


def local_tasks(
    hosts: str = "", ps_hosts: str = "", hostfile: str = "", task: str = "", workers_per_host: int | None = None
) -> LocalTasks:
    """Returns a cluster of hosts, the same on every host, and the tasks of this host.

    Args:
        hosts: The training hosts, each once, separated by commas. The tasks of a host get the ports 2222, 2223 and so on;
            the tasks of `host1:3000` get 3000, 3001 and so on.
        ps_hosts: As for `cluster`.
        hostfile: As for `cluster`.
        task: The tasks of this host, such as `worker:1` or `worker:2,worker:3`. Empty means the tasks at this host's addresses.
        workers_per_host: Training tasks on each host. None means 1, or the slots in `hostfile`.

    Raises:
        ConfigError: An argument is invalid (all errors are listed), or `task` is empty and none of the listed hosts, or several,
            are this host.
    """
    workers = _training_hosts(hosts, hostfile)
    servers = _split(ps_hosts)
    names = list(dict.fromkeys(host.lower() for host in workers))
    faults = []
    repeated = _repeated(workers)
    if repeated and not hostfile:
        faults.append(
            f"hosts has {repeated} more than once; write each host once, and set workers_per_host=2 for two tasks per host."
        )
    repeated = _repeated(servers)
    if repeated:
        faults.append(
            f"ps_hosts has {repeated} more than once; give each server on a host its own port: host3:2222,host3:2223."
        )
    if workers_per_host is not None and hostfile and len(names) < len(workers):
        faults.append(
            f"hostfile {hostfile} sets the number of tasks of each host; remove its slots, or leave out workers_per_host."
        )
    count = len(names) * (workers_per_host or 1)
    if count > MOST_TASKS:
        faults.append(f"a cluster has at most {MOST_TASKS} tasks. Received: {count}.")
    if faults:
        raise ConfigError(faults)
    if workers_per_host is not None:
        workers = [address for host in workers for address in _consecutive_ports(host, workers_per_host)]
    spec = _cluster(workers, servers)
    if task:
        return LocalTasks(spec, list(dict.fromkeys(parse_task(spec, text) for text in _split(task) or [task])))
    tasks_by_host: dict[str, list[TaskSpec]] = {}
    for member in spec.tasks():
        tasks_by_host.setdefault(split_address(spec.address(member))[0].lower(), []).append(member)
    local = [host for host, tasks in tasks_by_host.items() if _is_local(spec.address(tasks[0]))]
    if len(local) == 1:
        return LocalTasks(spec, tasks_by_host[local[0]])
    name = socket.gethostname()
    remedy = f"name the tasks to start here, such as --task={spec.tasks()[0]}."
    if local:
        raise ConfigError(f"{list_first(local, 4)} are all addresses of this host ({name}): {remedy}")
    raise ConfigError(
        f"this host ({name}) is not one of {list_first(list(tasks_by_host), 4)}: write the names or addresses by which the hosts reach "
        f"each other, or {remedy}"
    )


def _training_hosts(hosts: str, hostfile: str) -> list[str]:
    """Returns the host, or address, of each training task."""
    if bool(hosts) == bool(hostfile):
        raise ConfigError(f"either hosts or hostfile must be given. Received: hosts={hosts!r}, hostfile={hostfile!r}.")
    workers = _read(hostfile) if hostfile else _split(hosts)
    if not workers:
        raise ConfigError(f"hosts has no host; write it as host1,host2. Received: {format_value(hosts)}.")
    return workers


def _cluster(workers: Sequence[str], servers: Sequence[str], ps: int = 0) -> ClusterSpec:
    spec, _ = assign_roles(_add_default_ports([*workers, *servers]), 0, len(servers) or ps)
    return spec


def _repeated(hosts: Sequence[str]) -> str:
    """Returns the first host that is listed more than once, or an empty string."""
    counts = collections.Counter(host.lower() for host in hosts)
    return next((format_value(host) for host in hosts if counts[host.lower()] > 1), "")


def _consecutive_ports(host: str, count: int) -> list[str]:
    """Returns the addresses of `count` tasks on one host, with consecutive ports from the host's port, if it has a port."""
    name, _, port = host.rpartition(":")
    if not _has_port(host) or len(port) > 9:  # `ClusterSpec` reports a port that is too large
        return [host] * count
    return [f"{name}:{int(port) + offset}" for offset in range(count)]


def _has_port(host: str) -> bool:
    return bool(re.search(r":[0-9]+$", host)) and (host.count(":") == 1 or "[" in host)


def _split(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if any(items) and not all(items):
        raise ConfigError(
            f"a list of hosts or tasks has an empty name between its commas; remove the comma. Received: {format_value(text)}."
        )
    return list(filter(None, items))


def _read(path: str) -> list[str]:
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(f"hostfile {path}: {getattr(e, 'strerror', None) or e}.") from None
    hosts: list[str] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # mpirun's `max_slots` limits oversubscription: it does not change the number of tasks.
        options = [word for word in words[1:] if not word.startswith(("max_slots=", "max-slots="))]
        slots = re.fullmatch(r"slots=([0-9]{1,9})", " ".join(options or ["slots=1"]))
        if slots is None:
            faults.append(
                f"hostfile {path}, line {number}: expected 'host' or 'host slots=2'. Received: {format_value(line)}."
            )
        elif len(hosts) + int(slots[1]) > MOST_TASKS:
            faults.append(
                f"hostfile {path}, line {number}: more than {MOST_TASKS} tasks. Received: {format_value(line)}."
            )
        else:
            hosts += words[:1] * int(slots[1])
    if faults or not hosts:
        raise ConfigError(faults or f"hostfile {path} has no host.")
    return hosts


def _add_default_ports(hosts: Sequence[str]) -> list[str]:
    """Returns an address for each host; hosts without a port get the next free port on that host, from 2222."""
    addresses: list[str] = []
    taken: set[str] = set()
    next_port: dict[str, int] = {}  # by host
    for host in hosts:
        address = host
        if not _has_port(host):
            bare = f"[{host}]" if ":" in host and "[" not in host else host
            port = next_port.get(bare, PORT)
            while f"{bare}:{port}" in taken:
                port += 1
            next_port[bare] = port + 1
            address = f"{bare}:{port}"
        addresses.append(address)
        taken.add(address)
    return addresses


def parse_task(spec: ClusterSpec, text: str, name: str = "task") -> TaskSpec:
    """Returns the task of a cluster that a text, the argument `name`, names, such as `worker:1`.

    Raises:
        ConfigError: The cluster has no such task.
    """
    job, _, index = text.strip().partition(":")
    task = TaskSpec(job, int(index) if is_index(index) else -1)
    if task not in spec.tasks():
        tasks = ", ".join(map(str, spec.tasks()))
        raise ConfigError(f"{name} must be one of {tasks}. Received: {format_value(text)}.")
    return task


def _task_of_this_host(spec: ClusterSpec) -> TaskSpec:
    """Returns the only task whose address is this host's; raises ConfigError if there is no such task, or several."""
    local = [task for task in spec.tasks() if _is_local(spec.address(task))]
    if len(local) == 1:
        return local[0]
    reason = f"{', '.join(map(str, local))} are all on this host" if local else "none of them is on this host"
    raise ConfigError(f"task must name this process's task, one of {', '.join(map(str, spec.tasks()))}: {reason}.")


def _is_local(address: str) -> bool:
    """Returns whether an address is this host's: a socket can be bound to local addresses only."""
    host, _ = split_address(address)
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, socket_address in candidates:
        try:
            with socket.socket(family, kind, protocol) as s:
                s.bind(socket_address)
        except OSError:  # another host's address, or no IPv6 here
            continue
        return True
    return False
