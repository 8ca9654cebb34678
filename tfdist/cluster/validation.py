"""Validation of a cluster's jobs, addresses and tasks: an error message for each problem. No TensorFlow here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import format_value, truncate, unknown_name_message

JOBS = ("chief", "worker", "ps")
TASK_TYPES = (*JOBS, "evaluator")
MOST_TASKS = 10_000  # more are a mistake
# Systems read `127.1` as a loopback address, too.
_LOOPBACK = re.compile(r"localhost|(127|0)(\.[0-9.]+)?", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]+)")


def is_index(value: Any) -> bool:
    """Returns whether a value can be read as a task's index."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 10
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9


def cluster_faults(jobs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the errors in a cluster's jobs and addresses."""
    owner: dict[str, str] = {}
    for job, addresses in jobs.items():
        if job not in TASK_TYPES:
            yield unknown_name_message("job", job, TASK_TYPES)
        if not isinstance(addresses, (list, tuple)):
            yield f"job {format_value(job)} must be a list of 'host:port'. Received: {format_value(addresses)}"
            continue
        for index, address in enumerate(addresses):
            task = f"{truncate(str(job))}:{index}"
            fault = _address_fault(address)
            if fault:
                yield f"{task}: {fault}"
                continue
            # Addresses that differ only in case or in a port's leading zeros are the same.
            same = re.sub(r":0+(\d+)$", r":\1", address.lower())
            if same in owner:
                yield f"{task}: address {address!r} is already that of {owner[same]}; every task needs its own."
            else:
                owner[same] = task
    # Every host would connect to itself there (tensorflow#57372).
    loopback = [address for address in owner if is_each_hosts_own(address.rpartition(":")[0].strip("[]"))]
    if loopback and len(loopback) < len(owner):
        other = next(address for address in owner if address not in loopback)
        yield (
            f"{owner[loopback[0]]}: address {loopback[0]!r} is each host's own, but {owner[other]} is at {other!r}; write a name at "
            "which the other hosts reach it."
        )
    chiefs = jobs.get("chief", ())
    if isinstance(chiefs, (list, tuple)) and len(chiefs) > 1:
        yield f"a cluster has at most one chief; make the others workers. Received: {len(chiefs)}."
    if _jobs_are_valid(jobs) and jobs.get("ps"):
        yield from parameter_server_faults(jobs)
    elif _jobs_are_valid(jobs) and not _trains(jobs):
        yield f"a cluster needs a worker or a chief to train: add addresses to job 'worker'. Received: {_filled(jobs)}."


def parameter_server_faults(jobs: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error that lists the jobs that training with parameter servers needs and a cluster lacks."""
    missing = [repr(job) for job in JOBS if not jobs.get(job)]
    if missing:
        yield (
            "a cluster with parameter servers needs a chief, which coordinates, a worker and a ps: add addresses to job "
            f"{' and '.join(missing)}. Received: {_filled(jobs)}."
        )


def _filled(jobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{job} ({len(addresses)})" for job, addresses in jobs.items()) or "no job"


def _jobs_are_valid(jobs: Mapping[str, Any]) -> bool:
    return all(job in TASK_TYPES and isinstance(addresses, (list, tuple)) for job, addresses in jobs.items())


def _trains(jobs: Mapping[str, Any]) -> bool:
    return bool(jobs.get("chief") or jobs.get("worker"))


def is_each_hosts_own(host: str) -> bool:
    """Returns whether a host is a loopback or unspecified address, which leads each host to itself."""
    if _LOOPBACK.fullmatch(host):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified


def _address_fault(address: Any) -> str:
    if not isinstance(address, str):
        return f"an address is a text 'host:port'. Received: {format_value(address)}"
    excess = [component for component, sign in (("a scheme", "://"), ("a user", "@")) if sign in address]
    if excess:
        bare = address.split("://", 1)[-1].partition("/")[0].rsplit("@", 1)[-1]
        remedy = "'host:port', such as 'host1:2222'" if _address_fault(bare) else repr(bare)
        return f"address {format_value(address)} has {' and '.join(excess)}; write {remedy}."
    match = _ADDRESS.fullmatch(address)
    if not match:
        return f"address {format_value(address)} is not 'host:port', such as 'host1:2222' or '[::1]:2222'."
    if not 1 <= int(match["port"].lstrip("0")[:6] or 0) <= 65535:
        return f"port {truncate(match['port'])} of {format_value(address)} is out of range; expected 1 to 65535."
    return ""


def task_faults(kind: str, index: int, jobs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the errors in a task, given the jobs of its cluster."""
    task = f"{kind}:{index}"
    addresses = jobs.get(kind) or ()
    if kind not in TASK_TYPES:
        yield unknown_name_message("task type", kind, TASK_TYPES)
    elif isinstance(addresses, (list, tuple)) and addresses:
        size = len(addresses)
        if not 0 <= index < size:
            yield f"task {task}: index {index} is out of range; job {kind!r} has {size} tasks, 0 to {size - 1}."
    elif index < 0:
        yield f"task {task}: index {index} is out of range; expected 0 or more."
    # An evaluator need not be in the cluster. `cluster_faults` reports misspelled and invalid jobs.
    elif kind != "evaluator" and _jobs_are_valid(jobs) and _trains(jobs):
        filled = ", ".join(job for job, addresses in jobs.items() if addresses)
        yield f"task {task} has no job {kind!r} in the cluster, which has: {filled}."
