"""Stands for a program that the fork server runs: passes signals on to it, and ends as it ends.

Run by path, without site packages, so that it starts in some milliseconds. Arguments: the server's socket, the module, and the
module's arguments; see `fork_server`.
"""

import json
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
    signal.signal(each, lambda number, frame: server.send(bytes([number])))
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], [0, 1, 2, os.open("/proc/self/ns/net", os.O_RDONLY)])
code = os.waitstatus_to_exitcode(int.from_bytes(server.recv(4), "big"))
if code < 0:
    if code not in (-signal.SIGKILL, -signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
