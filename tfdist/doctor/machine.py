"""The machine's resources for this process: processors, memory, open files, and folders to write to. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, format_bytes, shorten
from tfdist.runtime.files import write_error_reason

ROOT = pathlib.Path("/sys/fs/cgroup")
_LEAST_MEMORY = 2**30  # bytes that a task with a small model needs
# Bytes of free space in a folder.
_LEAST_TEMPORARY = 100 * 2**20
_LEAST_WORKDIR = 2**30
_LEAST_SHARED = 128 * 2**20
_NO_LIMIT = 2**60  # bytes; without a limit cgroups of version 1 contain a number of this size


def resources(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about processors, memory and the number of open files."""
    import psutil

    yield processors(len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota())
    memory = psutil.virtual_memory()
    yield available_memory(memory.available, memory.total, memory_limit())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def processors(usable: int, of_machine: int, quota: float | None) -> Finding:
    """Returns a finding about the processors of this process and its quota of processor time; None means no quota."""
    value = f"{usable} of {of_machine}"
    if quota is None or quota >= usable:
        return Finding(OK, "processors", value)
    remedy = f"raise the quota, or set TF_NUM_INTRAOP_THREADS={max(1, int(quota))} in all tasks"
    value += f", for the time of {quota:g} (the quota of its cgroup)"
    return Finding(NOTE, "processors", value, f"TensorFlow starts a thread for each of the {usable}: {remedy}")


def available_memory(available: int, total: int, limit: int | None) -> Finding:
    """Returns a finding about the machine's free memory and the limit of its cgroup; None means no limit."""
    value = f"{format_bytes(available)} free of {format_bytes(total)}"
    if limit is not None and limit < total:
        value += f", limited to {format_bytes(limit)} by its cgroup"
        available = min(available, limit)
    if available >= _LEAST_MEMORY:
        return Finding(OK, "memory", value)
    remedy = "a task needs about 1 GiB besides its model and data: end other programs, or request more memory"
    return Finding(WARNING, "memory", value, remedy)


def open_files(limit: int) -> Finding:
    """Returns a finding about the number of files that this process may open."""
    if limit == resource.RLIM_INFINITY:
        return Finding(OK, "open files", "no limit")
    if limit < 1024:
        return Finding(WARNING, "open files", str(limit), "ulimit -n 4096")
    return Finding(OK, "open files", str(limit))


def cpu_quota(root: pathlib.Path = ROOT, cgroups: str | None = None) -> float | None:
    """Returns the quota of this process's cgroup in processors, or None; `cgroups` is the text of `/proc/self/cgroup`."""
    files = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of versions 2 and 1
    pairs = [pair for names in files for pair in _numbers(root, "cpu", cgroups, names) if len(pair) == 2]
    return min((quota / period for quota, period in pairs if quota > 0), default=None)


def memory_limit(root: pathlib.Path = ROOT, cgroups: str | None = None) -> int | None:
    """Returns the memory limit of this process's cgroup in bytes, or None. Arguments as in `cpu_quota`."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [int(limit) for name in names for (limit,) in _numbers(root, "memory", cgroups, (name,))]
    return min((value for value in limits if value < _NO_LIMIT), default=None)


def _numbers(root: pathlib.Path, controller: str, cgroups: str | None, names: tuple[str, ...]) -> Iterator[list[float]]:
    """Yields the numbers in the named files of this process's cgroup and of its parents; each may set a limit.

    In a container the path may be the host's path, while the container sees only its own subtree, at the root.
    """
    if cgroups is None:
        with contextlib.suppress(OSError):
            cgroups = pathlib.Path("/proc/self/cgroup").read_text()
    for line in (cgroups or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root
            cgroup = base / path.strip("/")
            for folder in (parent for parent in (cgroup, *cgroup.parents) if parent == base or base in parent.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                    yield [float(word) for name in names for word in (folder / name).read_text().split()]


def folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about the current folder, the folder of temporary files, and shared memory."""
    try:
        yield _writable("current folder", os.getcwd(), _LEAST_WORKDIR, "give --workdir a folder elsewhere")
    except OSError:
        yield Finding(ERROR, "current folder", "does not exist any more", "cd to a folder that exists")
    elsewhere = "free the disk, or set TMPDIR to a folder that can be written"
    named = environ.get("TMPDIR")
    if named:
        yield _writable("TMPDIR", named, _LEAST_TEMPORARY, elsewhere)
    if not named or cannot_write(named):
        tried = [environ.get("TEMP"), environ.get("TMP"), "/tmp", "/var/tmp", "/usr/tmp"]  # as Python's tempfile
        candidates = [candidate for candidate in tried if candidate]
        usable = next((candidate for candidate in candidates if not cannot_write(candidate)), None)
        if usable:
            yield _writable("temporary files", usable, _LEAST_TEMPORARY, elsewhere)
        else:
            shown = f"none of {', '.join(map(shorten, candidates))} can be written"
            yield Finding(ERROR, "temporary files", shown, elsewhere)
    if os.path.isdir("/dev/shm"):
        remedy = "docker run --shm-size=1g: NCCL exchanges gradients there"
        yield _writable("shared memory", "/dev/shm", _LEAST_SHARED, remedy)
    else:
        yield Finding(NOTE, "/dev/shm", "not there", "NCCL needs it for several GPUs: mount a tmpfs there")


def _writable(what: str, folder: str, least: int, remedy: str) -> Finding:
    why = cannot_write(folder)
    if why:
        return Finding(WARNING, what, f"{shorten(folder)} cannot be written: {why}", remedy)
    free = shutil.disk_usage(folder).free
    value = f"{shorten(folder)}, {format_bytes(free)} free"
    if free >= least:
        return Finding(OK, what, value)
    return Finding(WARNING, what, value, remedy)


def cannot_write(folder: str) -> str:
    """Returns why files cannot be written in a folder, or an empty text. The test file is removed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as e:
        return write_error_reason(e)
    except ValueError:  # a null byte
        return "not a valid folder name"
    return ""
