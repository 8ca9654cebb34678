"""The check of the cluster that a run on this host would use, and of the task's host and port. No TensorFlow here."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from tfdist.cluster import greeting
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.cluster.spec import split_address
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, printable, shorten
from tfdist.errors import ClusterError, ConfigError
from tfdist.runtime.report import progress

_TIMEOUT = 5.0  # seconds for resolvers that wait for other tasks
_ALONE = "unset TF_CONFIG to train on this machine alone"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the resolved cluster, or its errors, and findings about this task's host and port."""
    config = environ.get("TF_CONFIG", "")
    is_launched = bool(environ.get(progress.FOLDER))  # such a task may have several sources
    present = [name for name, (sign, _) in discovery.RESOLVERS.items() if environ.get(sign, "").strip()]
    others = [name for name in present if name != "tf_config"]
    if "".join(config.split()) not in ("", "{}") and others and not is_launched:
        value = f"set together with the variables of {' and '.join(others)}, and takes precedence"
        yield Finding(WARNING, "TF_CONFIG", value, "unset TF_CONFIG if an earlier run has left it")
    try:
        resolved = discovery.resolve(environ, timeout=_TIMEOUT)
    except ConfigError as e:
        remedy = f"correct it, or {_ALONE}" if config else "correct it"
        yield from (Finding(ERROR, "cluster", printable(fault), remedy) for fault in e.faults)
    except ClusterError as e:
        yield Finding(WARNING, "cluster", printable(str(e)), "run this in all tasks at once")
    else:
        if resolved is None:
            hint = discovery.misconfiguration_hint(environ)
            if hint:
                yield Finding(WARNING, "cluster", "none", hint)
            else:
                yield Finding(OK, "cluster", "none: one process on this machine")
            return
        value = f"{resolved.task} of {len(resolved.cluster.tasks())} tasks, by {resolved.source}"
        if resolved.source == "tf_config" and not is_launched:
            yield Finding(NOTE, "cluster", value, _ALONE)
        else:
            yield Finding(OK, "cluster", value)
        if resolved.task in resolved.cluster.tasks():
            yield _own_address(resolved)


def _own_address(resolved: ResolvedCluster) -> Finding:
    """Returns a finding about the task's address: whether this machine has the address, and whether the port is free."""
    address = resolved.cluster.address(resolved.task)
    host = shorten(split_address(address)[0])
    what = "own address"
    try:
        theirs = _resolve_host(split_address(address)[0])
    except OSError as e:
        remedy = "correct the name, or add it to DNS or /etc/hosts"
        return Finding(WARNING, what, f"{host} is not known here: {e.strerror or e}", remedy)
    if not theirs & _addresses_of_this_machine():
        value = f"{resolved.task} should be at {host} ({', '.join(sorted(theirs))}), which is not an address of this machine"
        remedy = "unset TF_CONFIG if another run has left it, or give this machine its own task"
        return Finding(WARNING, what, value, f"{remedy}; right only behind a translated address")
    try:
        with greeting.listening_for_peers(resolved.cluster, resolved.task):
            return Finding(OK, "own port", f"{address} is free")
    except ClusterError as e:
        return Finding(ERROR, "own port", printable(str(e)), "end that process, or give the task another port")


def host_name(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding about this host's name: whether it resolves to this host, also from other hosts."""
    name = shorten(socket.gethostname())
    what = "host name"
    remedy = f"give {name} its address in DNS or /etc/hosts"
    try:
        addresses = _resolve_host(socket.gethostname())
    except OSError as e:
        yield Finding(WARNING, what, f"{name} is not known here: {e.strerror or e}", remedy)
        return
    value = f"{name}: {', '.join(sorted(addresses))}"
    if not addresses & _addresses_of_this_machine():
        yield Finding(WARNING, what, f"{value}, which is not an address of this machine", remedy)
    elif all(ipaddress.ip_address(address).is_loopback for address in addresses):
        yield Finding(NOTE, what, f"{value}, which leads each host to itself", f"for several hosts, {remedy}")
    else:
        yield Finding(OK, what, value)


def _resolve_host(host: str) -> set[str]:
    """Returns the addresses of a host's name, or raises an OSError. May take long: call it in a thread."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label of the name is too long or empty
        raise OSError("not a valid host name") from None
    return {str(entry[4][0]).partition("%")[0] for entry in entries}  # without the zone of an IPv6 address


def _addresses_of_this_machine() -> set[str]:
    """Returns all addresses of this machine, with the loopback addresses that every machine has."""
    import psutil

    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses = {a.address.partition("%")[0] for a in entries if a.family in (socket.AF_INET, socket.AF_INET6)}
    return addresses | {"127.0.0.1", "127.0.1.1", "::1", "0.0.0.0"}
