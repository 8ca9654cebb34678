"""Processors, memory and open files that this process may use: of the machine, its scheduler and its container. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
from collections.abc import Iterator, Mapping

from tfdist.doctor.report import NOTE, OK, WARNING, Finding, format_bytes

ROOT = pathlib.Path("/sys/fs/cgroup")
_LEAST_MEMORY = 2**30  # bytes: what a task takes with a small model
_LEAST_FILES = 1024
_NO_LIMIT = 2**60  # bytes; cgroups of version 1 write a number of this size where there is no limit


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about processors, memory and the number of open files."""
    import psutil

    usable, of_machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield processors(usable, of_machine, cpu_quota())
    memory, limit = psutil.virtual_memory(), memory_limit()
    yield available_memory(memory.available, memory.total, limit)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def processors(usable: int, of_machine: int, quota: float | None) -> Finding:
    """Returns how many processors this process may use.

    Args:
        usable: Those that it may run on.
        of_machine: All.
        quota: How many processors' time it gets at most; None is no limit.
    """
    value = f"{usable} of {of_machine}"
    if quota is not None and quota < usable:
        threads = max(1, int(quota))
        return Finding(
            NOTE,
            "processors",
            f"{value}, for the time of {quota:g} (the quota of its cgroup)",
            f"TensorFlow starts a thread for each of the {usable}: raise the quota, or set TF_NUM_INTRAOP_THREADS={threads} in all tasks",
        )
    return Finding(OK, "processors", value)


def available_memory(available: int, total: int, limit: int | None) -> Finding:
    """Returns how much memory is free.

    Args:
        available: Bytes that the machine has free.
        total: Bytes that it has.
        limit: Bytes that this process and those beside it may use together; None is no limit.
    """
    value = f"{format_bytes(available)} free of {format_bytes(total)}"
    if limit is not None and limit < total:
        value += f", limited to {format_bytes(limit)} by its cgroup"
    if min(available, total if limit is None else limit) < _LEAST_MEMORY:
        return Finding(
            WARNING,
            "memory",
            value,
            "a task needs about 1 GiB besides its model and data: end other programs, or ask for more",
        )
    return Finding(OK, "memory", value)


def open_files(limit: int) -> Finding:
    """Returns how many files this process may open."""
    value = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
    few = limit != resource.RLIM_INFINITY and limit < _LEAST_FILES
    return Finding(WARNING if few else OK, "open files", value, "ulimit -n 4096" if few else "")


def cpu_quota(root: pathlib.Path = ROOT, own: str | None = None) -> float | None:
    """Returns how many processors' time this process's cgroup gives it, or None.

    Args:
        root: Where cgroups are.
        own: What `/proc/self/cgroup` says; None reads it.
    """
    found = []
    for folder in _folders(root, "cpu", own):
        with contextlib.suppress(OSError, ValueError):
            if (file := folder / "cpu.max").exists():
                quota, period = file.read_text().split()
            else:
                quota, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
            if float(quota) > 0:  # ValueError for "max"
                found.append(float(quota) / float(period))
    return min(found, default=None)


def memory_limit(root: pathlib.Path = ROOT, own: str | None = None) -> int | None:
    """Returns how many bytes this process's cgroup may use, or None. Arguments as of `cpu_quota`."""
    found = []
    for folder in _folders(root, "memory", own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
    return min((each for each in found if each < _NO_LIMIT), default=None)


def _folders(root: pathlib.Path, controller: str, own: str | None) -> Iterator[pathlib.Path]:
    """Yields this process's cgroup and those around it, each of which may set a limit.

    In a container the path may be that of the host, of which the container sees only its own part, at the root.
    """
    if own is None:
        try:
            own = pathlib.Path("/proc/self/cgroup").read_text()
        except OSError:
            return
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root
            here = base / path.strip("/")
            yield from (each for each in (here, *here.parents) if each == base or base in each.parents)
