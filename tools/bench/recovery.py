"""What backups cost, and how long a restart takes.

Overhead: step time of `fit` with a backup every few steps and without any, on an MLP of 10.5 million parameters with Adam (126 MB
of state); means over the steps of a round, as a backup falls on few of them. Uploads: the same with a model of 0.4 million parameters
(5 MB of state) and a backup every 500 steps in a local folder or at `s3://`, a server of moto on the same cores. Restart: from `kill -9` of one of two workers to the
end of the first new step, and its parts, in seconds; with `warm` the tasks are forked from a process that has imported TensorFlow.
Memory: of that process, and of the tasks with it, forked and spawned.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, against

STEPS = 40
# Parts of a restart: name, and the moments between which it lies.
PARTS = {
    "detection": ("killed", "lost_at"),
    "process start": ("lost_at", "started"),
    "imports": ("started", "imported"),
    "cluster start": ("imported", "connected"),
    "model": ("connected", "built"),
    "data and symbolic build": ("built", "begun"),
    "restore": ("begun", "restored"),
    "tracing and first step": ("restored", "stepped"),
    "all": ("killed", "stepped"),
}
UNAVOIDABLE = ("imports", "tracing and first step")
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
CASES = [
    {"what": "overhead", "workers": 2, "save_freq": 10},
    {"what": "uploads", "workers": 2, "save_freq": 500},
    {"what": "restart", "workers": 2, "save_freq": 10},
    {"what": "restart", "workers": 2, "save_freq": 10, "warm": True},
    {"what": "memory", "workers": 2, "save_freq": 10},
]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case: in ms for the overhead, in seconds for the restart, in MB for memory."""
    options = {**case, "steps": STEPS}
    if case["what"] == "overhead":
        found = run_cluster("tools.bench.recovery_program", {**options, "rounds": rounds}, case["workers"])
        samples = {name: [each * 1000 for each in found[name]] for name in ("none", "backups")}
        return Record("recovery", case, "ms", samples, against("none", samples))
    if case["what"] == "uploads":
        with _storage() as port:
            options |= {"rounds": rounds, "port": port, "steps": 1000}
            found = run_cluster("tools.bench.recovery_program", options, case["workers"])
        samples = {name: [each * 1000 for each in found[name]] for name in ("folder", "s3")}
        return Record("recovery", case, "ms", samples, against("folder", samples))

    def restart(warm: bool) -> dict[str, Any]:
        given = {**options, "what": "restart", "rounds": 1}
        return run_cluster("tools.bench.recovery_program", given, case["workers"], max_restarts=1, warm=warm)

    if case["what"] == "memory":
        both = [(restart(True), restart(False)) for _ in range(rounds)]
        samples = {name: [forked["memory"][name] for forked, _ in both] for name in ("spare RSS", "spare PSS")}
        samples["all, forked"] = [forked["memory"]["all PSS"] for forked, _ in both]
        samples["all, spawned"] = [spawned["memory"]["all PSS"] for _, spawned in both]
        return Record("recovery", case, "MB", samples)
    each = [restart(case.get("warm", False)) for _ in range(rounds)]
    parts = {part: [found[end] - found[begin] for found in each] for part, (begin, end) in PARTS.items()}
    parts["all but imports, tracing"] = [
        whole - sum(parts[part][number] for part in UNAVOIDABLE) for number, whole in enumerate(parts["all"])
    ]
    return Record("recovery", case, "s", parts)


@contextlib.contextmanager
def _storage() -> Iterator[int]:
    """Yields the port of an S3 server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdin and server.stdout
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()
