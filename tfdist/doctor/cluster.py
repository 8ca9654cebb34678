"""The cluster that a run started here would find, by which resolver, and whether this host and port are the task's own.

No TensorFlow here.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from tfdist.cluster import greeting
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import ClusterSpec, TaskSpec, split_address
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, printable, shorten
from tfdist.errors import ClusterError, ConfigError
from tfdist.runtime import progress

_TIMEOUT = 5.0  # seconds for resolvers that wait for the others


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields which cluster is found, or what is wrong with it, and findings about this task's host and port."""
    yield from _stale_tf_config(environ)
    try:
        found = discovery.resolve(environ, timeout=_TIMEOUT)
    except ConfigError as e:
        remedy = (
            "correct it, or unset TF_CONFIG to train on this machine alone"
            if environ.get("TF_CONFIG")
            else "correct it"
        )
        for fault in e.faults:
            yield Finding(ERROR, "cluster", printable(fault), remedy)
        return
    except ClusterError as e:
        yield Finding(WARNING, "cluster", printable(str(e)), "run this in all tasks at once")
        return
    if found is None:
        hint = discovery.misconfiguration_hint(environ)
        yield (
            Finding(WARNING, "cluster", "none", hint)
            if hint
            else Finding(OK, "cluster", "none: one process on this machine")
        )
        return
    value = f"{found.task} of {len(found.cluster.tasks())} tasks, by {found.source}"
    if found.source == "tf_config" and not environ.get(progress.FOLDER):
        yield Finding(NOTE, "cluster", value, "unset TF_CONFIG to train on this machine alone")
    else:
        yield Finding(OK, "cluster", value)
    if found.task in found.cluster.tasks():
        yield from _own_address(found)


def _stale_tf_config(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding where TF_CONFIG hides a scheduler's cluster. A task that tfdist's launcher has started may have both."""
    others = [
        name for name, (sign, _) in discovery.RESOLVERS.items() if name != "tf_config" and environ.get(sign, "").strip()
    ]
    text = "".join(environ.get("TF_CONFIG", "").split())
    if text and text != "{}" and others and not environ.get(progress.FOLDER):
        yield Finding(
            WARNING,
            "TF_CONFIG",
            f"set beside the variables of {' and '.join(others)}, and comes before them",
            "unset TF_CONFIG if an earlier run has left it",
        )


def _own_address(found: ResolvedCluster) -> Iterator[Finding]:
    """Yields whether the task's address is one of this machine's, and then whether its port is free."""
    host, _ = split_address(found.cluster.address(found.task))
    try:
        theirs = _resolve_host(host)
    except OSError as e:
        yield Finding(
            WARNING,
            "own address",
            f"{shorten(host)} is not known here: {e.strerror or e}",
            "correct the name, or add it to DNS or /etc/hosts",
        )
        return
    if not theirs & _addresses_of_this_machine():
        yield Finding(
            WARNING,
            "own address",
            f"{found.task} is to be at {shorten(host)} ({', '.join(sorted(theirs))}), which is no address of this machine",
            "unset TF_CONFIG if another run has left it, or give this machine its own task; right only behind a translated address",
        )
        return
    yield _own_port(found.cluster, found.task)


def _own_port(cluster: ClusterSpec, task: TaskSpec) -> Finding:
    """Returns whether this task can listen at its port."""
    address = cluster.address(task)
    try:
        with greeting.listening_for_peers(cluster, task):
            pass
    except ClusterError as e:
        return Finding(ERROR, "own port", printable(str(e)), "end that process, or give the task another port")
    return Finding(OK, "own port", f"{address} is free")


def host_name(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields whether the name of this host leads to it, also for other hosts."""
    name = socket.gethostname()
    remedy = f"give {shorten(name)} its address in DNS or /etc/hosts"
    try:
        found = _resolve_host(name)
    except OSError as e:
        yield Finding(WARNING, "host name", f"{shorten(name)} is not known here: {e.strerror or e}", remedy)
        return
    value = f"{shorten(name)}: {', '.join(sorted(found))}"
    if not found & _addresses_of_this_machine():
        yield Finding(WARNING, "host name", f"{value}, which is no address of this machine", remedy)
    elif all(map(_is_loopback, found)):
        yield Finding(NOTE, "host name", f"{value}, which each host takes for itself", f"for several hosts, {remedy}")
    else:
        yield Finding(OK, "host name", value)


def _resolve_host(host: str) -> set[str]:
    """Returns the addresses of a host's name. May take long: call it in a thread.

    Raises:
        OSError: The name is not known.
    """
    try:
        return {_without_zone(str(entry[4][0])) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except UnicodeError:  # a part of the name is too long, or empty
        raise OSError("no name of a host") from None


def _addresses_of_this_machine() -> set[str]:
    """Returns all addresses of this machine, with the loopback addresses that every machine has."""
    import psutil

    found = {
        _without_zone(entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return found | {f"127.0.{part}.1" for part in (0, 1)} | {"::1", "0.0.0.0"}


def _is_loopback(address: str) -> bool:
    """Returns whether each machine means itself by an address."""
    return ipaddress.ip_address(address).is_loopback


def _without_zone(address: str) -> str:
    """Returns an address without the zone of an IPv6 address."""
    return address.partition("%")[0]
