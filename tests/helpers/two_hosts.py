"""Two network namespaces, joined, as two hosts of one machine with names of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shlex
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
def outage(hosts: list[tuple[str, str]], how: str) -> Iterator[None]:
    """Interrupts the link between two hosts of `joined`, until the end of the context.

    Args:
        hosts: The hosts.
        how: "unplugged": the second host's end is down, which both ends notice. "silent": each host sends to a hardware address that
            nobody has, and notices nothing, as while a switch between them starts again.
    """
    commands, undo = [], []
    if how == "unplugged":
        commands = [["-n", hosts[1][0], "link", "set", hosts[1][1], "down"]]
        undo = [["-n", hosts[1][0], "link", "set", hosts[1][1], "up"]]
    for (space, end), other in zip(hosts, ADDRESSES[::-1], strict=True) if how == "silent" else ():
        neighbour = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
        commands.append(["-n", space, "neigh", "replace", other, "dev", end, *neighbour])
        undo.append(["-n", space, "neigh", "delete", other, "dev", end])
    for command in commands:
        ip(*command)
    try:
        yield
    finally:
        for command in undo:
            ip(*command)


@contextlib.contextmanager
def two(folder: pathlib.Path) -> Iterator[list[list[str]]]:
    """Makes them; yields for each the words that run a command on it, as `commands` returns them."""
    with joined() as hosts:
        yield commands(hosts, folder)


def commands(hosts: list[tuple[str, str]], folder: pathlib.Path) -> list[list[str]]:
    """Returns for each host of `joined` the words that run a command on it.

    Args:
        hosts: The hosts.
        folder: For a file of their names, `NAMES`, which stand for `ADDRESSES`.
    """
    known = folder / "hosts"
    known.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True)))

    def on(space: str, name: str) -> list[str]:
        own = f'hostname {name} && mount --bind {known} /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "sh", "-c", own, "sh"]

    return [on(space, name) for (space, _), name in zip(hosts, NAMES, strict=True)]


def mpirun_options(on: list[list[str]], folder: pathlib.Path) -> list[str]:
    """Returns the options by which `mpirun`, itself on the first host, starts a rank on each.

    Args:
        on: What `two` yields.
        folder: For a program in the place of ssh.
    """
    agent = folder / "agent"
    cases = [f'{name}) exec {shlex.join(own)} sh -c "$*";;' for name, own in zip(NAMES, on, strict=True)]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *cases, "esac"]))
    agent.chmod(0o755)
    return ["--host", ",".join(f"{name}:1" for name in NAMES), "--mca", "plm_rsh_agent", str(agent)]


def ip(*words: str, check: bool = True) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words], check=check, capture_output=True)
