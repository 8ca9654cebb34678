"""Jobs on a Ray cluster of three nodes, all on this machine.

Loss: from the removal of a node that runs a worker to the end of the first new step, in seconds. Workers `2` start again on the nodes that
remain, one of which has been idle; workers `2:4` continue with two. Step: the step time of the same two workers, each bound to a core, that
`tfdist launch` has started with and without `--ray`; the cluster runs in both cases.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools.bench.frame import ENVIRON, MEMORY, ROOT, TaskFailed
from tools.bench.record import Record, against

SECONDS = 300  # limit of a job
STEPS = 1500
CASES = [
    {"what": "loss", "workers": "2"},
    {"what": "loss", "workers": "2:4"},
    {"what": "step", "workers": "2"},
]
# By the number of workers: the CPUs of each node, and the launcher's further flags.
NODES = {"2": (1, 1, 1), "2:4": (2, 1, 1)}
FLAGS = {"2": ("--max_restarts=1",), "2:4": ()}


def missing() -> str:
    """Returns why nothing can be measured here, or an empty text."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed (pip install '.[ray]')"


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case: in seconds for a loss, in ms for a step."""
    workers = case["workers"]
    flags = [f"--workers={workers}", *FLAGS[workers]]
    with _cluster(NODES[workers]) as cluster:
        on_ray = [*flags, f"--ray={cluster.address}"]
        if case["what"] == "loss":
            seconds = [_seconds_of_a_loss(cluster, on_ray) for _ in range(rounds)]
            return Record("ray_jobs", case, "s", {"until the first new step": seconds})
        samples: dict[str, list[float]] = {"this machine": [], "Ray": []}
        for _ in range(rounds):
            samples["this machine"].append(_step_ms(flags))
            samples["Ray"].append(_step_ms(on_ray))
    return Record("ray_jobs", case, "ms", samples, against("this machine", samples))


@contextlib.contextmanager
def _cluster(cpus: Sequence[int]) -> Iterator[Any]:
    """Yields a Ray cluster with a node for each number of CPUs."""
    # The nodes pass their variables to the workers.
    os.environ |= {**ENVIRON, **MEMORY, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    head, *others = cpus
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
    try:
        for count in others:
            cluster.add_node(num_cpus=count)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def _job(flags: Sequence[str], what: str) -> Iterator[tuple[pathlib.Path, subprocess.Popen[bytes]]]:
    """Yields the folder and the launcher of a job, which must succeed."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        options = {"what": what, "steps": STEPS}
        program = [sys.executable, "-m", "tools.bench.ray_jobs_program", name, json.dumps(options)]
        command = [sys.executable, "-m", "tfdist", "launch", *flags, f"--log_dir={name}/logs", "--", *program]
        output = folder / "output"
        with output.open("wb") as file:
            launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield folder, launcher
            if launcher.wait(SECONDS):
                raise TaskFailed(output.read_text()[-2000:])
        except (TimeoutError, subprocess.TimeoutExpired) as e:
            raise TaskFailed(f"{e}: {output.read_text()[-2000:]}") from e
        finally:
            launcher.kill()  # and with it its workers
            launcher.wait()


def _seconds_of_a_loss(cluster: Any, flags: Sequence[str]) -> float:
    with _job(flags, "loss") as (folder, launcher):
        _until(lambda: [*folder.glob("backup/*/manifest*")] or launcher.poll() is not None)
        used = {int(pid) for path in folder.glob("ancestors-*") for pid in path.read_text().split()}
        lost = next(node for node in cluster.worker_nodes if _raylet(node) in used)
        removed = time.time()
        cluster.remove_node(lost, allow_graceful=False)
        launcher.wait(SECONDS)
        stepped = float((folder / "stepped").read_text())
    cluster.add_node(num_cpus=1)
    return stepped - removed


def _raylet(node: Any) -> int:
    """Returns the process that has started the actors of a node."""
    return int(node.all_processes["raylet"][0].process.pid)


def _step_ms(flags: Sequence[str]) -> float:
    with _job(flags, "step") as (folder, launcher):
        launcher.wait(SECONDS)
        return 1000 * float((folder / "step").read_text())


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no backup within {SECONDS} s")
        time.sleep(0.05)
