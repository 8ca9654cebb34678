"""Runs a benchmark's program as the tasks of a cluster of this machine, in a network laboratory where links matter."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from tfdist.launch import network_namespaces
from tfdist.launch.launcher import Launcher
from tools.netlab import Lab, goodput

ROOT = pathlib.Path(__file__).parents[2]
# TensorFlow leaves oneDNN off on processors without AVX-512, on which its matrix products are twice as fast with it.
ENVIRON = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}
# Alike for all that is compared: what glibc does by default with large blocks makes training on CPUs slow or fast by chance.
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}


class TaskFailed(Exception):
    """A benchmark's task has failed."""


def run(
    program: str,
    options: dict[str, Any],
    workers: int,
    ps: int = 0,
    rate: str | None = None,
    memory: bool = True,
    **launcher: Any,
) -> dict[str, Any]:
    """Returns what a program has written to `results.json` of its folder, its first argument, or to `results-*.json`.

    Args:
        program: A module; its second argument is `options` as JSON.
        options: For the program.
        workers: How many.
        ps: How many parameter servers.
        rate: Of each task's link, as for `Lab`; None means without a laboratory.
        memory: Whether glibc keeps large blocks in all tasks.
        **launcher: As for `Launcher`.

    Returns:
        The results, and `tasks`, those of each file `results-*.json`; `bytes_per_second`, what TCP reaches on a link of the
        laboratory; `lost_at`, when a task was lost.

    Raises:
        TaskFailed: A task has failed.
        SystemExit: A signal has ended them.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        netns, reached = "", None
        if rate is not None:
            lab = stack.enter_context(Lab(workers + ps + bool(ps), rate))
            netns = ",".join(host.netns for host in lab.hosts)
            reached = goodput(lab.hosts[0], lab.hosts[-1]) if workers > 1 else None
        cluster, prefixes = network_namespaces.assign_namespaces(workers, ps, netns)
        environ = {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT), **(MEMORY if memory else {})}
        environ.pop("TF_CONFIG", None)
        words = [sys.executable, "-m", program, folder, json.dumps(options)]
        started = Launcher(words, cluster, pathlib.Path(folder, "logs"), environ, prefixes=prefixes, **launcher)
        if code := started.run():
            if started.failure:
                raise TaskFailed(str(started.failure))
            sys.exit(code)
        whole = pathlib.Path(folder, "results.json")
        results = json.loads(whole.read_text()) if whole.exists() else {}
        tasks = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("results-*.json"))]
        return {**results, "tasks": tasks, "bytes_per_second": reached, "lost_at": started.lost_at}
