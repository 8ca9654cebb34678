"""Signs of work of this process: processor time, files and connections of its threads. No TensorFlow here.

A task that others wait for may be slow or stuck. A thread that waits for a lock, or sleeps, gets no time slice; one that computes, or sends
an upload in parts, does. `/proc/self/io` counts the bytes of files but not those of sockets, so time slices decide there. The threads of
tfdist and gRPC run for their own purposes and do not count. Other threads that are not Python's, such as TensorFlow's, count if they compute.
"""

from __future__ import annotations

import os
import pathlib
import socket
import struct
import threading
from typing import NamedTuple

_TASKS = pathlib.Path("/proc/self/task")
_OWN = "tfdist-"  # prefix of the names of tfdist's threads
_GRPC = ("event_engine", "grpc", "lifeguard")
_BUSY = 0.01  # share of a core; the threads in which TensorFlow receives the watch's own messages take 0.0003
_DESCRIPTORS = pathlib.Path("/proc/self/fd")
_BYTES = struct.Struct("QQ")  # tcpi_bytes_acked and tcpi_bytes_received of Linux' tcp_info
_BYTES_AT = 120


class Thread(NamedTuple):
    """The counters of a thread: time slices, seconds of processor time, bytes of files read or written, and whether it is Python's."""

    slices: int
    seconds: float
    bytes: int
    is_python: bool


def is_known() -> bool:
    """Returns whether this system counts the work of threads: Linux, with the kernel's scheduler statistics."""
    return (_TASKS.parent / "schedstat").exists()


def threads() -> dict[int, Thread]:
    """Returns the counters of this process's threads, without those of tfdist and gRPC, by id; empty on systems other than Linux."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    counters = {}
    for path in _TASKS.glob("*"):
        tid = int(path.name)
        name = python.get(tid)
        if name is not None and name.startswith(_OWN):
            continue
        try:
            if name is None and (path / "comm").read_text().startswith(_GRPC):
                continue
            nanoseconds, _, slices = map(int, (path / "schedstat").read_text().split())
        except (OSError, ValueError):  # it has ended, or the kernel has no such file
            continue
        counters[tid] = Thread(slices, nanoseconds / 1e9, _file_bytes(path), name is not None)
    return counters


def _file_bytes(path: pathlib.Path) -> int:
    try:
        lines = (path / "io").read_text().splitlines()
        return int(lines[0].split()[1]) + int(lines[1].split()[1])
    except (OSError, ValueError, IndexError):  # the kernel may be built without it
        return 0


def has_worked(before: dict[int, Thread], after: dict[int, Thread], seconds: float) -> bool:
    """Returns whether threads have worked between two calls of `threads`, which are so many seconds apart."""
    if not after:
        return True  # unknown
    computed = 0.0
    for tid, now in after.items():
        then = before.get(tid, Thread(0, 0.0, 0, now.is_python))
        if now.bytes != then.bytes or (now.is_python and now.slices != then.slices):
            return True
        computed += now.seconds - then.seconds
    return computed > _BUSY * seconds


def has_computed(before: dict[int, Thread], after: dict[int, Thread], seconds: float, main: int | None) -> bool:
    """Returns whether the thread `main`, or threads that are not Python's, have computed between two calls of `threads`."""
    if main in after and after[main].slices != before.get(main, after[main]).slices:
        return True
    then = sum(thread.seconds for tid, thread in before.items() if not thread.is_python and tid in after)
    now = sum(thread.seconds for thread in after.values() if not thread.is_python)
    return now - then > _BUSY * seconds


def sent_and_received() -> int:
    """Returns the bytes that this process has sent and received over its open TCP connections; 0 on systems other than Linux."""
    total = 0
    for path in _DESCRIPTORS.glob("*"):
        try:
            if os.readlink(path).startswith("socket:"):
                # A copy: the descriptor belongs to a library, which may close it at any moment.
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(_BYTES.unpack_from(information, _BYTES_AT))
        except (OSError, ValueError, struct.error):  # closed meanwhile, or no TCP connection
            pass
    return total
