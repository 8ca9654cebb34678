"""A cluster as a list of hosts. No TensorFlow here."""

from __future__ import annotations

import collections
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.cluster.resolvers.environment import PORT, assign_roles
from tfdist.cluster.spec import ClusterSpec, ClusterTask, TaskSpec, split_address
from tfdist.cluster.validation import MOST_TASKS
from tfdist.errors import ConfigError, format_value, list_first
from tfdist.runtime.files import read_file


def cluster(hosts: str = "", ps_hosts: str = "", hostfile: str = "", task: str = "", ps: int = 0) -> ClusterTask:
    """Returns a cluster of hosts, and this process's task.

    Args:
        hosts: The addresses of the training tasks, between commas; 2222 is the port of those without. Several tasks of one
            host without ports get 2222, 2223, and so on.
        ps_hosts: Those of the parameter servers; the first of `hosts` is then the chief.
        hostfile: A file instead of both, as of mpirun: a line `host slots=2` for each host, `#` before comments.
        task: This process's, as `worker:1`. Empty means the one whose host this is, if there is one.
        ps: How many of the last ones are parameter servers, without `ps_hosts`.

    Raises:
        ConfigError: With every fault of them, or more than one task, or none, could be this process.
    """
    spec = _cluster(_given(hosts, hostfile), _split(ps_hosts), ps)
    return ClusterTask(spec, _task(spec, task) if task else _own(spec))


class LocalTasks(NamedTuple):
    """A cluster of hosts, and the tasks of it that run on this one."""

    cluster: ClusterSpec
    tasks: Sequence[TaskSpec]


def local_tasks(
    hosts: str = "", ps_hosts: str = "", hostfile: str = "", task: str = "", workers_per_host: int | None = None
) -> LocalTasks:
    """Returns a cluster of hosts, the same on all of them, and the tasks of this host.

    Args:
        hosts: The training hosts, each once, between commas. Tasks get the ports 2222, 2223, and so on, or those from the port
            in `host1:3000` on.
        ps_hosts: As for `cluster`.
        hostfile: As for `cluster`.
        task: The tasks of this host, as `worker:1` or `worker:2,worker:3`. Empty means those at its addresses.
        workers_per_host: Training tasks of each host. None means 1, or the slots of `hostfile`.

    Raises:
        ConfigError: With every fault of them; or this host is none of them, or more than one.
    """
    addresses, servers = _given(hosts, hostfile), _split(ps_hosts)
    names = list(dict.fromkeys(host.lower() for host in addresses))
    faults = []
    if repeated := _repeated([] if hostfile else addresses):
        faults.append(
            f"hosts has {repeated} more than once; write each host once, and workers_per_host=2 for two tasks."
        )
    if repeated := _repeated(servers):
        faults.append(
            f"ps_hosts has {repeated} more than once; give each server of a host a port, as host3:2222,host3:2223."
        )
    if workers_per_host is not None and hostfile and len(names) < len(addresses):
        faults.append(
            f"hostfile {hostfile} says how many tasks each host gets; leave out its slots, or workers_per_host."
        )
    if (count := len(names) * (workers_per_host or 1)) > MOST_TASKS:
        faults.append(f"a cluster has at most {MOST_TASKS} tasks. Received: {count}.")
    if faults:
        raise ConfigError(faults)
    if workers_per_host is not None:
        addresses = [host_task for host in addresses for host_task in _at_following_ports(host, workers_per_host)]
    spec = _cluster(addresses, servers)
    if task:
        return LocalTasks(spec, list(dict.fromkeys(_task(spec, host_task) for host_task in _split(task) or [task])))
    by_host: dict[str, list[TaskSpec]] = {}
    for host_task in spec.tasks():
        by_host.setdefault(split_address(spec.address(host_task))[0].lower(), []).append(host_task)
    here = [host for host, tasks in by_host.items() if _is_here(spec.address(tasks[0]))]
    if len(here) == 1:
        return LocalTasks(spec, by_host[here[0]])
    of = list_first(here or list(by_host), 4)
    name = socket.gethostname()
    raise ConfigError(
        f"{of} are all addresses of this host ({name}): name the tasks to start here, as --task={spec.tasks()[0]}."
        if here
        else f"this host ({name}) is none of {of}: write the names or addresses by which the hosts reach each other, or name the tasks "
        f"to start here, as --task={spec.tasks()[0]}."
    )


def _given(hosts: str, hostfile: str) -> list[str]:
    """Returns the training tasks' hosts."""
    if bool(hosts) == bool(hostfile):
        raise ConfigError(f"either hosts or hostfile must be given. Received: hosts={hosts!r}, hostfile={hostfile!r}.")
    if not (names := _read(hostfile) if hostfile else _split(hosts)):
        raise ConfigError(f"hosts has no host; write it as host1,host2. Received: {format_value(hosts)}.")
    return names


def _cluster(addresses: Sequence[str], servers: Sequence[str], ps: int = 0) -> ClusterSpec:
    spec, _ = assign_roles(_add_default_ports([*addresses, *servers]), 0, len(servers) or ps)
    return spec


def _repeated(hosts: Sequence[str]) -> str:
    """Returns the first host that is there more than once, or an empty text."""
    counts = collections.Counter(host.lower() for host in hosts)
    return next((format_value(host) for host in hosts if counts[host.lower()] > 1), "")


def _at_following_ports(host: str, count: int) -> list[str]:
    """Returns the addresses of some tasks of one host, from its port on, if it has one."""
    name, _, port = host.rpartition(":")
    if not _has_port(host) or len(port) > 9:  # a fault, which the cluster names
        return [host] * count
    return [f"{name}:{int(port) + number}" for number in range(count)]


def _has_port(host: str) -> bool:
    return bool(re.search(r":[0-9]+$", host)) and (host.count(":") == 1 or "[" in host)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read(path: str) -> list[str]:
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(f"hostfile {path}: {getattr(e, 'strerror', None) or e}.") from None
    names: list[str] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        # `max_slots`, of which mpirun knows too, is a limit of its own.
        more = [word for word in words[1:] if not word.startswith(("max_slots=", "max-slots="))]
        slots = re.fullmatch(r"slots=([0-9]{1,9})", more[0]) if len(more) == 1 else None
        if more and not slots:
            faults.append(
                f"hostfile {path}, line {number}: expected 'host' or 'host slots=2'. Received: {format_value(line)}."
            )
        elif len(names) + (count := int(slots[1]) if slots else 1) > MOST_TASKS:
            faults.append(
                f"hostfile {path}, line {number}: more than {MOST_TASKS} tasks. Received: {format_value(line)}."
            )
        elif words:
            names += words[:1] * count
    if faults or not names:
        raise ConfigError(faults or f"hostfile {path} has no host.")
    return names


def _add_default_ports(hosts: Sequence[str]) -> list[str]:
    """Returns the addresses, of which those without a port get the next one of their host."""
    addresses: list[str] = []
    taken: set[str] = set()
    following: dict[str, int] = {}  # the next port of a host
    for host in hosts:
        address = host
        if not _has_port(host):
            bare = f"[{host}]" if ":" in host and "[" not in host else host
            port = following.get(bare, PORT)
            while (address := f"{bare}:{port}") in taken:
                port += 1
            following[bare] = port + 1
        addresses.append(address)
        taken.add(address)
    return addresses


def _task(spec: ClusterSpec, text: str) -> TaskSpec:
    kind, colon, index = text.strip().partition(":")
    task = TaskSpec(kind, int(index)) if colon and index.isascii() and index.isdigit() and len(index) < 10 else None
    if task not in spec.tasks():
        known = ", ".join(map(str, spec.tasks()))
        raise ConfigError(f"task must be one of {known}. Received: {format_value(text)}.")
    return task


def _own(spec: ClusterSpec) -> TaskSpec:
    """Returns the task whose address is one of this host's."""
    own = [task for task in spec.tasks() if _is_here(spec.address(task))]
    if len(own) == 1:
        return own[0]
    description = f"these are on this host: {', '.join(map(str, own))}" if own else "none of them is on this host"
    raise ConfigError(f"task must say which of {', '.join(map(str, spec.tasks()))} this process is, as {description}.")


def _is_here(address: str) -> bool:
    """Returns whether an address's host is this one: only a host's own addresses can be bound."""
    host, _ = split_address(address)
    try:
        known = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, place in known:
        try:
            with socket.socket(family, kind, protocol) as s:
                s.bind(place)
        except OSError:  # another host's, or no such addresses here
            continue
        return True
    return False
