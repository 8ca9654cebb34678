"""Two network namespaces, joined, as two hosts of one machine with names of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.211.0.1", "10.211.0.2")
NAMES = ("node0", "node1")
_COUNT = itertools.count()  # a process may have two at once


def missing() -> str:
    """Returns why there can be none here, or an empty text."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    there = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode == 0
    return "" if there else "no namespaces"


@contextlib.contextmanager
def joined() -> Iterator[list[tuple[str, str]]]:
    """Makes two network namespaces, with `ADDRESSES`; yields for each its name, and that of its end of the link."""
    mine = f"{os.getpid() % 10**7}x{next(_COUNT)}"
    spaces = [f"tfdist{mine}{letter}" for letter in "ab"]
    ends = [f"tf{mine}{letter}" for letter in "ab"]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip(spaces, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "address", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield list(zip(spaces, ends, strict=True))
    finally:
        for space in spaces:
            ip("netns", "delete", space, check=False)


@contextlib.contextmanager
def two(folder: pathlib.Path) -> Iterator[list[list[str]]]:
    """Makes them; yields for each the words that run a command on it.

    Args:
        folder: For a file of their names, `NAMES`, which stand for `ADDRESSES`.
    """
    known = folder / "hosts"
    known.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True)))

    def on(space: str, name: str) -> list[str]:
        own = f'hostname {name} && mount --bind {known} /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "sh", "-c", own, "sh"]

    with joined() as hosts:
        yield [on(space, name) for (space, _), name in zip(hosts, NAMES, strict=True)]


def ip(*words: str, check: bool = True) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words], check=check, capture_output=True)
