"""A cluster as a list of hosts. No TensorFlow here."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from tfdist.cluster.resolvers.environment import PORT, assign_roles
from tfdist.cluster.spec import ClusterSpec, ClusterTask, TaskSpec, split_address
from tfdist.cluster.validation import MOST_TASKS
from tfdist.errors import ConfigError, format_value
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
    if bool(hosts) == bool(hostfile):
        raise ConfigError(f"either hosts or hostfile must be given. Received: hosts={hosts!r}, hostfile={hostfile!r}.")
    given = _read(hostfile) if hostfile else _split(hosts)
    servers = _split(ps_hosts)
    addresses = _add_default_ports([*given, *servers])
    spec, _ = assign_roles(addresses, 0, len(servers) or ps)
    return ClusterTask(spec, _task(spec, task) if task else _own(spec))


def _split(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _read(path: str) -> list[str]:
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(f"hostfile {path}: {getattr(e, 'strerror', None) or e}.") from None
    found: list[str] = []
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
        elif len(found) + (count := int(slots[1]) if slots else 1) > MOST_TASKS:
            faults.append(
                f"hostfile {path}, line {number}: more than {MOST_TASKS} tasks. Received: {format_value(line)}."
            )
        elif words:
            found += words[:1] * count
    if faults or not found:
        raise ConfigError(faults or f"hostfile {path} has no host.")
    return found


def _add_default_ports(hosts: Sequence[str]) -> list[str]:
    """Returns the addresses, of which those without a port get the next one of their host."""
    found: list[str] = []
    taken: set[str] = set()
    following: dict[str, int] = {}  # the next port of a host
    for host in hosts:
        address = host
        if not re.search(r":[0-9]+$", host) or host.endswith("]") or (host.count(":") > 1 and "[" not in host):
            bare = f"[{host}]" if ":" in host and "[" not in host else host
            port = following.get(bare, PORT)
            while (address := f"{bare}:{port}") in taken:
                port += 1
            following[bare] = port + 1
        found.append(address)
        taken.add(address)
    return found


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
    found = f"these are on this host: {', '.join(map(str, own))}" if own else "none of them is on this host"
    raise ConfigError(f"task must say which of {', '.join(map(str, spec.tasks()))} this process is, as {found}.")


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
