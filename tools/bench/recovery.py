"""What backups cost, and how long a restart takes.

Overhead: step time of `fit` with a backup every few steps and without any, on an MLP of 10.5 million parameters with Adam (126 MB
of state); means over the steps of a round, as a backup falls on few of them. Restart: from `kill -9` of one of two workers to the
end of the first new step, and its parts, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
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
CASES = [{"what": "overhead", "workers": 2, "save_freq": 10}, {"what": "restart", "workers": 2, "save_freq": 10}]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case: in ms for the overhead, in seconds for the restart."""
    options = {**case, "steps": STEPS}
    if case["what"] == "overhead":
        found = run_cluster("tools.bench.recovery_program", {**options, "rounds": rounds}, case["workers"])
        samples = {name: [each * 1000 for each in found[name]] for name in ("none", "backups")}
        return Record("recovery", case, "ms", samples, against("none", samples))
    each = [
        run_cluster("tools.bench.recovery_program", {**options, "rounds": 1}, case["workers"], max_restarts=1)
        for _ in range(rounds)
    ]
    parts = {part: [found[end] - found[begin] for found in each] for part, (begin, end) in PARTS.items()}
    parts["all but imports, tracing"] = [
        whole - sum(parts[part][number] for part in UNAVOIDABLE) for number, whole in enumerate(parts["all"])
    ]
    return Record("recovery", case, "s", parts)
