"""Hosts that are network namespaces on one bridge, each on a link that is limited in both directions.

A namespace has no name: a process of its own holds it open, which the system kills when this process ends, however it does. It
goes with the last process in it, so that nothing is left over. Laboratories do not meet, and none of their traffic touches an
interface of the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence

TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")
_RATE = re.compile(r"([1-9][0-9]*)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DEVICE = "eth0"
_CLOSING_SECONDS = 30.0  # for which processes are killed that are on the hosts
_LONGEST_DELAY = 10_000
_MOST = 250  # addresses of 10.77.0.0/24


def missing() -> str:
    """Returns why there can be no laboratory here, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{', '.join(lacking)} not found: make system-deps"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


@dataclasses.dataclass(frozen=True)
class Host:
    """One of a laboratory's hosts.

    Attributes:
        netns: The path of its network namespace, as for `tools.netlab.launch --netns`.
        address: Its IPv4 address.
    """

    netns: str
    address: str

    def on(self, *command: str) -> list[str]:
        """Returns the words that run a command there."""
        return ["nsenter", f"--net={self.netns}", *command]

    def counters(self) -> tuple[int, int]:
        """Returns the bytes that its interface has received and sent so far."""
        shown = subprocess.run(self.on("cat", "/proc/net/dev"), capture_output=True, text=True, check=True).stdout
        (line,) = (line for line in shown.splitlines() if line.strip().startswith(f"{_DEVICE}:"))
        numbers = line.partition(":")[2].split()
        return int(numbers[0]), int(numbers[8])


class Lab:
    """A context manager: makes the hosts, and ends them.

    Args:
        hosts: How many, 1 to 250.
        rate: Of each host's link, in both directions, as `tc` writes it: `100mbit`, `1gbit`. Empty means unlimited.
        delay: The milliseconds that a message takes from one host to another, at least; half of them on each of the two links.

    Attributes:
        hosts: The hosts, inside.

    Raises:
        ValueError: An argument is not such.
        RuntimeError: The rights or tools are missing, or a command has failed.
    """

    def __init__(self, hosts: int, rate: str = "", delay: float = 0.0):
        if not 1 <= hosts <= _MOST:
            raise ValueError(f"hosts must be 1 to {_MOST}. Received: {hosts}.")
        if rate and not _RATE.fullmatch(rate):
            raise ValueError(f"rate must be such as 100mbit or 1gbit, or empty. Received: {rate!r}.")
        if not 0 <= delay <= _LONGEST_DELAY:
            raise ValueError(f"delay must be 0 to {_LONGEST_DELAY} milliseconds. Received: {delay}.")
        self.rate = rate
        self.delay = delay
        self.hosts: list[Host] = []
        self._count = hosts
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        if reason := missing():
            raise RuntimeError(reason)
        try:
            switch = self._hold()
            self._ip(switch, "link add br0 type bridge", "link set br0 up")
            self.hosts = [self._host(switch, number) for number in range(self._count)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that still runs on the hosts, and with it the hosts."""
        with contextlib.ExitStack() as stack:
            ours = set()
            for holder in self._holders:
                with contextlib.suppress(OSError):  # an open one's number is given to no other meanwhile
                    opened = stack.enter_context(open(_path(holder.pid), "rb"))
                    ours.add(os.readlink(f"/proc/self/fd/{opened.fileno()}"))
                holder.kill()
                holder.wait()
            ours.discard(os.readlink(_path(os.getpid())))
            deadline = time.monotonic() + _CLOSING_SECONDS
            while (left := [pid for pid in _processes() if _uses(pid, ours)]) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                time.sleep(0.02)
        self._holders = []
        self.hosts = []

    def _hold(self) -> int:
        """Returns the id of a process in a network namespace of its own."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        holder = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for others
        self._holders.append(holder)
        deadline = time.monotonic() + 60
        while _identity(holder.pid) in (None, _identity(os.getpid())):
            if time.monotonic() > deadline or holder.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} makes no network namespace")
            time.sleep(0.005)
        return holder.pid

    def _host(self, switch: int, number: int) -> Host:
        holder = self._hold()
        address, port = f"10.77.0.{number + 1}", f"port{number}"
        # Made where its ends belong, never in the machine's own namespace.
        if self.delay:
            self._delay(holder, switch, port)
        else:
            _run(f"ip link add {port} netns {switch} type veth peer name {_DEVICE} netns {holder}".split())
        self._ip(holder, f"address add {address}/24 dev {_DEVICE}", f"link set {_DEVICE} up", "link set lo up")
        self._ip(switch, f"link set {port} master br0", f"link set {port} up")
        if self.rate:
            for place, device in ((holder, _DEVICE), (switch, port)):
                _run(["nsenter", f"--net={_path(place)}", *limit(device, self.rate).split()])
        return Host(_path(holder), address)

    def _delay(self, holder: int, switch: int, port: str) -> None:
        """Makes a link with a delay, which a process of its own passes on."""
        ends = [_path(holder), _DEVICE, _path(switch), port]
        command = [sys.executable, "-m", "tools.netlab.delayed_link", *ends, str(self.delay / 2)]
        relay = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=pathlib.Path(__file__).parents[2],
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        self._holders.append(relay)
        assert relay.stdout is not None
        with relay.stdout:
            if relay.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{' '.join(command)} makes no link")

    def _ip(self, place: int, *lines: str) -> None:
        _run(["nsenter", f"--net={_path(place)}", "ip", "-batch", "-"], "\n".join(lines))


def limit(device: str, rate: str) -> str:
    """Returns the command that limits a device to a rate.

    What an idle link has saved up passes at once: a millisecond's worth, or small messages would not be limited.
    """
    number, unit = _RATE.fullmatch(rate).groups()
    burst = max(16_000, int(number) * _BITS[unit] / 8 / 1000)
    return f"tc qdisc add dev {device} root tbf rate {rate} burst {burst:.0f} latency 100ms"


def _path(pid: int) -> str:
    return f"/proc/{pid}/ns/net"


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _uses(pid: int, spaces: Collection[str]) -> bool:
    """Whether a process is in one of these namespaces, or on its way there: it has opened one."""
    opened: list[str] = []
    with contextlib.suppress(OSError):
        opened = os.listdir(f"/proc/{pid}/fd")
    for file in opened:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{file}") in spaces:
                return True
    return _identity(pid) in spaces  # last: on its way it would be missed otherwise


def _identity(pid: int | str) -> str | None:
    """Returns which network namespace a process is in, None where it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
