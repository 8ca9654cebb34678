"""What TCP reaches from one host of a laboratory to another."""

from __future__ import annotations

import subprocess
import sys

from tools.netlab.lab import Host

_RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
    print(received, time.monotonic(), flush=True)
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    print(time.monotonic(), flush=True)
    connection.sendall(bytes(int(sys.argv[2])))
"""


def goodput(sender: Host, receiver: Host, size: int = 25_000_000) -> float:
    """Returns the bytes a second at which so many are carried from one host to another.

    Args:
        sender: From where.
        receiver: To where.
        size: Bytes to send.

    Raises:
        RuntimeError: Nothing has come through.
    """
    command = receiver.on(sys.executable, "-c", _RECEIVE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            send = sender.on(sys.executable, "-c", _SEND, receiver.address, str(size))
            sent = subprocess.run(send, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
            received, ended = process.communicate(timeout=30)[0].split()
            return int(received) / (float(ended) - float(sent.stdout))
        except (AssertionError, subprocess.SubprocessError, ValueError) as e:
            process.kill()
            raise RuntimeError(f"nothing comes from {sender.address} to {receiver.address}: {e}") from e
