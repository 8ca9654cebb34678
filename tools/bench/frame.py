"""Runs a benchmark's program as the tasks of a cluster of this machine, in a network laboratory where links matter.

Without a laboratory tasks are pinned to cores if that is wanted, as a laboratory's are: by `cores_for`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tools.netlab import Lab, goodput
from tools.netlab.launch import assign_namespaces, cores_for

ROOT = pathlib.Path(__file__).parents[2]
# TensorFlow leaves oneDNN off on processors without AVX-512, on which its matrix products are twice as fast with it.
ENVIRON = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}
# Alike for all that is compared: what glibc does by default with large blocks makes training on CPUs slow or fast by chance.
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
# Each task is bound by `taskset`.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
MPIRUN_SECONDS = 900


class TaskFailed(Exception):
    """A benchmark's task has failed."""


def run(
    program: str,
    options: dict[str, Any],
    workers: int,
    ps: int = 0,
    rate: str | None = None,
    delay: float = 0.0,
    memory: bool = True,
    pinned: bool = False,
    mpirun: bool = False,
    **launcher: Any,
) -> dict[str, Any]:
    """Returns what a program has written to `results.json` of its folder, its first argument, or to `results-*.json`.

    Args:
        program: A module; its second argument is `options` as JSON.
        options: For the program.
        workers: How many.
        ps: How many parameter servers.
        rate: Of each task's link, as for `Lab`; None means without a laboratory.
        delay: From one task's host to another's, as for `Lab`.
        memory: Whether glibc keeps large blocks in all tasks.
        pinned: Whether each task has its own share of the cores without a laboratory, too.
        mpirun: Whether Open MPI's `mpirun` starts the tasks, pinned and without TF_CONFIG. Without a laboratory only.
        **launcher: As for `Options` of the launcher.

    Returns:
        The results, and `tasks`, those of each file `results-*.json`; `bytes_per_second`, what TCP reaches on a link of the
        laboratory; `lost_at`, when a task was lost.

    Raises:
        TaskFailed: A task has failed.
        SystemExit: A signal has ended them.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cluster, prefixes, reached = local_cluster(workers, ps), {}, None
        if rate is not None:
            lab = stack.enter_context(Lab(workers + ps + bool(ps), rate, delay))
            cluster, prefixes = assign_namespaces(workers, ps, ",".join(host.netns for host in lab.hosts))
            reached = goodput(lab.hosts[0], lab.hosts[-1]) if workers > 1 else None
        environ = {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT), **(MEMORY if memory else {})}
        environ.pop("TF_CONFIG", None)
        words = [sys.executable, "-m", program, folder, json.dumps(options)]
        lost_at = None
        if mpirun:
            _mpirun(words, workers, environ)
        else:
            if pinned and not prefixes:
                bound = _bindings(workers + ps)
                prefixes = dict(zip(cluster.tasks(), bound, strict=True))
            started = Launcher(
                Options(words, cluster, pathlib.Path(folder, "logs"), environ, prefixes=prefixes, **launcher)
            )
            if code := started.run():
                if started.failure:
                    raise TaskFailed(str(started.failure))
                sys.exit(code)
            lost_at = started.lost_at
        whole = pathlib.Path(folder, "results.json")
        results = json.loads(whole.read_text()) if whole.exists() else {}
        tasks = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("results-*.json"))]
        return {**results, "tasks": tasks, "bytes_per_second": reached, "lost_at": lost_at}


def _bindings(tasks: int) -> list[list[str]]:
    """Returns for each task the words that bind a command to its share of this process's cores."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores_for(number, tasks, cores) for number in range(tasks)]
    return [["taskset", "--cpu-list", ",".join(map(str, share))] for share in shares]


def _mpirun(words: Sequence[str], workers: int, environ: Mapping[str, str]) -> None:
    """Runs a command as the ranks of an `mpirun`, each bound to its share of the cores.

    Raises:
        TaskFailed: It has failed, or does not end.
    """
    command = list(MPIRUN)
    for number, bound in enumerate(_bindings(workers)):
        command += [*([":"] if number else []), "-np", "1", *bound, *words]
    kept = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
    # `timeout` ends mpirun by a signal, so that mpirun ends its ranks.
    limited = ["timeout", "--kill-after=10", str(MPIRUN_SECONDS), *command]
    done = subprocess.run(limited, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise TaskFailed(f"mpirun ended with exit code {done.returncode}: {done.stdout.strip()[-2000:]}")
