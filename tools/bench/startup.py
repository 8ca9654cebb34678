"""Seconds from `python -m tfdist.train` to the end of the first step.

In parts, of the task that came last: when it asks for the others, all of them are there. What is between the parts (reading the
configuration, building model and data) is in "all" alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record

PARTS = ("imports", "preflight", "server start", "tracing and first step", "all")
CASES = [{"tasks": tasks} for tasks in (1, 2, 4)]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in seconds."""
    each = [run_cluster("tools.bench.startup_program", case, case["tasks"], memory=False) for _ in range(rounds)]
    last = [min(found["tasks"], key=lambda parts: parts["preflight"]) for found in each]
    return Record("startup", case, "s", {part: [found[part] for found in last] for part in PARTS})
