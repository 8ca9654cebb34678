"""Stands for a program that the fork server runs: passes signals on to it, and ends as it ends.

Run by path, without site packages, so that it starts in some milliseconds. Arguments: the server's socket, the module, and the
module's arguments; see `fork_server`.
"""

import json
import os
import signal
import socket
import sys

PASSED = {each: each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT)}
PASSED[signal.SIGUSR1] = signal.SIGKILL
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # the server takes what comes first for the request
for each in PASSED:
    signal.signal(each, lambda number, frame: server.send(bytes([PASSED[number]])))
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], [0, 1, 2, os.open("/proc/self/ns/net", os.O_RDONLY)])
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
status = server.recv(4)
assert status, "the server has ended"
code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
if code < 0:
    if code not in (-signal.SIGKILL, -signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
