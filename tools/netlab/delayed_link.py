"""A link between two network namespaces whose frames arrive some milliseconds late: the kernel here may lack netem.

    python -m tools.netlab.delayed_link NETNS DEVICE NETNS DEVICE MILLISECONDS

The two devices are TAP devices, which this process makes and joins. It prints `ready` when both are there; they end with it.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

# <linux/if_tun.h>. Segments of up to 64 KiB pass undivided, or each packet would cost a call.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _SEGMENT_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_LARGEST = 1 << 17


def open_device(netns: str, name: str) -> int:
    """Creates a TAP device in a network namespace, into which this process moves; returns its file."""
    with open(netns) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {netns}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFO | _SEGMENT_HEADER
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS)
    return file


def relay(first: int, second: int, delay: float) -> None:
    """Passes each frame of one device to the other after a delay in seconds; does not return."""
    other = {first: second, second: first}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # in the order of their times
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for file in select.select([first, second], [], [], timeout)[0]:
            try:
                waiting.append((time.monotonic() + delay, other[file], os.read(file, _LARGEST)))
            except BlockingIOError:
                continue
        while waiting and waiting[0][0] <= time.monotonic():
            _, file, frame = waiting.popleft()
            try:
                os.write(file, frame)
            except OSError:  # the device is not up: a link without a carrier loses frames, too
                continue


if __name__ == "__main__":
    devices = [open_device(*sys.argv[1:3]), open_device(*sys.argv[3:5])]
    print("ready", flush=True)
    relay(*devices, float(sys.argv[5]) / 1000)
