"""Two network namespaces, joined, as two hosts of one machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.211.0.1", "10.211.0.2")


def missing() -> str:
    """Returns why there can be none here, or an empty text."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    return "" if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0 else "no namespaces"


@contextlib.contextmanager
def two() -> Iterator[list[list[str]]]:
    """Makes them; yields for each the words that run a command on it. Their addresses are `ADDRESSES`."""
    names = [f"tfdist{os.getpid()}-{number}" for number in range(2)]
    ends = [f"tf{os.getpid() % 10**7}{letter}" for letter in "ab"]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)
