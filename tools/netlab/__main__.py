"""Runs a command beside hosts of its own, on links of a chosen rate; says what has crossed them.

    python -m tools.netlab --hosts=4 --rate=100mbit -- python -m tools.netlab.launch --workers=4 -- python script.py

The command finds the hosts in TFDIST_NETNS, where `tools.netlab.launch` looks: each task runs on one of them. Any other program
runs on one with `nsenter --net=PATH`. Exit code: the command's; 2 where there can be no laboratory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from tools.netlab.lab import Lab


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="", help="of each link, as 100mbit or 1gbit; empty means unlimited")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds from one host to another")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    try:
        with Lab(args.hosts, args.rate, args.delay) as lab:
            return run(lab, args.command)
    except (ValueError, RuntimeError) as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 2


def run(lab: Lab, command: list[str]) -> int:
    """Runs a command in a laboratory; returns its exit code, 128 + the signal's number where it was killed."""
    before, began = [host.counters() for host in lab.hosts], time.monotonic()
    environ = {**os.environ, "TFDIST_NETNS": ",".join(host.netns for host in lab.hosts)}
    # If this process is killed, the command is told to end, and the hosts end with it.
    with subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], env=environ) as process:
        # A terminal's Ctrl-C reaches the command itself; what is sent to this process is passed on.
        signal.signal(signal.SIGINT, signal.SIG_IGN if os.isatty(0) else lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        code = process.wait()
    seconds = time.monotonic() - began
    for host, (received, sent) in zip(lab.hosts, before, strict=True):
        now_received, now_sent = host.counters()
        print(
            f"netlab: {host.address} sent {(now_sent - sent) / 1e6:.3f} MB, received "
            f"{(now_received - received) / 1e6:.3f} MB in {seconds:.1f} s",
            flush=True,
        )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
