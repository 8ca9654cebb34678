"""Tasks of real processes, one of which has another TensorFlow, say who differs, and end."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest

from tfdist.cluster import ClusterSpec, TaskSpec, free_ports

ROOT = pathlib.Path(__file__).parents[2]
HERE = metadata.version("tensorflow")
STRATEGY = (
    "import sys, tfdist\ntfdist.create_strategy(sys.argv[1], start_timeout=60)\nprint('has started', flush=True)\n"
)


@pytest.fixture
def older(tmp_path):
    """A folder that stands before the installed packages, in which TensorFlow's metadata is that of an older version."""
    folder = tmp_path / "older" / "tensorflow-2.20.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.20.0\n")
    return folder.parent


def start(command, jobs, older, other, python=sys.executable):
    """Runs a command as each task of a cluster, one of which has older metadata; returns the exit codes and what each says.

    Args:
        command: The arguments of Python.
        jobs: How many tasks each job has.
        older: A folder that stands before the installed packages of the one that differs.
        other: The one that differs.
        python: Its Python.
    """
    ports = iter(free_ports(sum(jobs.values())))
    spec = ClusterSpec({job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in jobs.items()})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
    processes = []
    try:
        for task in spec.tasks():
            path = f"{older}:{ROOT}" if task == other else str(ROOT)
            environ = {**kept, "PYTHONPATH": path, "TF_CONFIG": spec.to_tf_config(task), "TF_CPP_MIN_LOG_LEVEL": "2"}
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            words = [python if task == other else sys.executable, *command]
            processes.append(subprocess.Popen(words, env=environ, cwd=older.parent, **both))
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [process.returncode for process in processes], said, spec


def sentence(spec, other):
    return f"version of TensorFlow must be the same on all tasks. Received: {HERE} on this task, 2.20.0 on {other} at {spec.address(other)}."


def test_the_check_of_a_cluster_names_the_task_that_differs(older):
    other = TaskSpec("worker", 1)
    codes, said, spec = start(["-m", "tfdist.cluster", "check", "--connect"], {"worker": 3}, older, other)
    assert codes == [1, 1, 1], said
    assert sentence(spec, other) in said[0]
    assert f"Received: 2.20.0 on this task, {HERE} on worker:" in said[1]
    assert sentence(spec, other) in said[2]
    assert "worker:2" not in said[0]


STRATEGIES = pytest.mark.parametrize(
    ("strategy", "jobs"),
    [("multi_worker_mirrored", {"worker": 2}), ("parameter_server", {"chief": 1, "worker": 1, "ps": 1})],
)


@pytest.mark.full
@STRATEGIES
def test_a_strategy_names_it_before_tensorflow_connects(older, tmp_path, strategy, jobs):
    script = tmp_path / "script.py"
    script.write_text(STRATEGY)
    other = TaskSpec("worker", jobs["worker"] - 1)
    codes, said, spec = start([str(script), strategy], jobs, older, other)
    assert codes == [1] * len(codes), said
    assert sentence(spec, other) in said[0], "the chief says who"
    assert f"Received: 2.20.0 on this task, {HERE} on " in said[spec.tasks().index(other)]
    assert "has started" not in "".join(said)


@pytest.mark.skipif("TFDIST_OTHER_PYTHON" not in os.environ, reason="tools/versions.py alone has a second environment")
@STRATEGIES
def test_a_task_of_another_environment_is_named(tmp_path, strategy, jobs):
    python = os.environ["TFDIST_OTHER_PYTHON"]
    ask = [python, "-c", "from importlib.metadata import version; print(version('tensorflow'))"]
    there = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    (tmp_path / "empty").mkdir()
    script = tmp_path / "script.py"
    script.write_text(STRATEGY)
    other = TaskSpec("worker", jobs["worker"] - 1)
    codes, said, spec = start([str(script), strategy], jobs, tmp_path / "empty", other, python)
    assert codes == [1] * len(codes), said
    assert f"Received: {HERE} on this task, {there} on {other} at {spec.address(other)}" in said[0]
    assert f"Received: {there} on this task, {HERE} on " in said[spec.tasks().index(other)]
    assert "has started" not in "".join(said)
