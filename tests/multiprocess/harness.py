"""Runs a program of this folder in one process or as a real local cluster, and collects what each rank returns."""

import dataclasses
import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.helpers import fork_server
from tests.multiprocess.roles import Roles
from tfdist.cluster import local_cluster
from tfdist.collectives import shared_memory_rendezvous
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 600
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
TRANSPORT = "TRANSPORT_OF_TEST"
HOSTS = "HOSTS_OF_TEST"  # a name for each rank, between commas: ranks of one name pretend to be on one host


def run(
    module: str, strategy: str, out: pathlib.Path, *args: str, size: int = 2, transport: str = "", restarts: int = 0
) -> list[dict[str, Any]]:
    """Runs `tests.multiprocess.<module>` and returns each rank's results.

    Args:
        module: The program's name.
        strategy: Passed to the program; a name that begins with `multi_worker` makes it a cluster.
        out: An empty folder for the results and logs.
        *args: More arguments for the program.
        size: The cluster's workers.
        transport: What `transport` returns in the program.
        restarts: How many times the cluster restarts after a failure.
    """
    command = fork_server.command(f"tests.multiprocess.{module}", strategy, str(out), *args)
    is_cluster = strategy.startswith("multi_worker")
    run_command(command, out, size if is_cluster else 0, {TRANSPORT: transport} if transport else {}, restarts)
    return [load(out, rank) for rank in range(size if is_cluster else 1)]


def run_command(
    command: list[str], out: pathlib.Path, workers: int, environ: Mapping[str, str] = {}, restarts: int = 0
) -> None:
    """Runs a command in one process, or as the workers of a cluster, whose logs are in the folder; it must succeed."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", **environ}
    environ.pop("TF_CONFIG", None)
    if not workers:
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    shown = io.BytesIO()
    options = Options(["timeout", str(TIMEOUT), *command], local_cluster(workers), out / "logs", environ)
    options = dataclasses.replace(options, max_restarts=restarts, fresh_ports=True)
    code = Launcher(options, output=shown).run()
    assert code == 0, shown.getvalue().decode()


def run_roles(module: str, folder: pathlib.Path, workers: int, *cases: str) -> tuple[dict[str, Any], str, pathlib.Path]:
    """Runs `tests.multiprocess.<module>` with two parameter servers; returns the chief's results, its log, and their folder."""
    command = fork_server.command(f"tests.multiprocess.{module}", str(folder / "out"), *cases)
    log = run_command_in_roles(command, folder, workers)
    return load(folder / "out", 0), log, folder / "out"


def run_command_in_roles(command: list[str], folder: pathlib.Path, workers: int) -> str:
    """Runs a command with two parameter servers; it must succeed. Returns the chief's log."""
    with Roles(command, folder / "roles", workers) as roles:
        code = roles.wait("chief:0", TIMEOUT)
        assert code == 0, roles.log("chief:0")
        assert [roles.wait(task, 60) for task in roles.processes] == [0] * len(roles.processes), "every role ends"
        return roles.log("chief:0")


def transport() -> dict[str, str]:
    """Returns the option that says how gradients travel, where a test has said so by `environ`; pretends hosts, if it has."""
    if hosts := os.environ.get(HOSTS):
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        shared_memory_rendezvous.host_key = lambda: hosts.split(",")[int(rank)]
    return {"transport": os.environ[TRANSPORT]} if TRANSPORT in os.environ else {}


def by_grpc() -> Iterator[None]:
    """Makes programs that a module's tests start exchange gradients over gRPC, as those of several hosts do. For a fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRANSPORT, "grpc")
        yield


def mpi_environ(transport: str, **more: str) -> dict[str, str]:
    """Returns the environment of programs that `mpirun` starts, whose gradients are to travel by `transport`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", TRANSPORT: transport, **more}


def mpirun(
    module: str, out: pathlib.Path, *args: str, size: int = 2, transport: str = "mpi", ends_well: bool = True
) -> list[dict[str, Any]]:
    """Runs `tests.multiprocess.<module>` by Open MPI's `mpirun`, and returns each rank's results, as `run`."""
    command = [*MPIRUN, "-np", str(size), sys.executable, "-m", f"tests.multiprocess.{module}", "multi_worker_mirrored"]
    done = subprocess.run(
        ["timeout", str(TIMEOUT), *command, str(out), *args],
        env=mpi_environ(transport),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT + 30,
    )
    assert done.returncode == 0 or not ends_well, done.stdout + done.stderr
    return [load(out, rank) for rank in range(size)]


def store(out: str, rank: int, results: dict[str, Any]) -> None:
    """Writes a rank's results for `run` to return."""
    path = pathlib.Path(out, f"rank{rank}.pickle")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(results))


def load(out: pathlib.Path, rank: int) -> dict[str, Any]:
    """Returns what `store` wrote."""
    return pickle.loads((out / f"rank{rank}.pickle").read_bytes())


def load_all(out: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what each rank has stored."""
    return [load(out, rank) for rank in range(len([*out.glob("rank*.pickle")]))]


def difference(a: Any, b: Any) -> float:
    """Returns by how much two structures of numbers differ at most; their shapes must be the same."""
    a, b = _flat(a), _flat(b)
    assert [each.shape for each in a] == [each.shape for each in b]
    return max(float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True))


def check_trained_alike(found: list[dict[str, Any]], transport: str) -> None:
    """Compares what two ranks of `transport_program` have trained by a transport with the same by TensorFlow's collectives."""
    for results in found:
        assert results["transport"] == transport
        assert results["travelled"] == ["all_gather", "all_reduce", "all_to_all"]
        assert results["travelled since"] == 0
        for case, (before, after) in results["mine"].items():
            assert all(np.isfinite(weights).all() for weights in after)
            assert difference(before, after) > 1e-3, case
            assert difference(after, results["tensorflow"][case][1]) == 0, case
            assert difference(after, found[0]["mine"][case][1]) == 0, case


def check_exchanges(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Compares what ranks of `compression_program exchanges rows kinds` have got by two transports."""
    for here, there in zip(mine, other, strict=True):
        for name, steps in there["exchanges"].items():
            assert difference(here["exchanges"][name], steps) == 0, name
        for name, (weights, _) in there["rows"].items():
            assert difference(here["rows"][name][0], weights) == 0, name
        assert difference(here["kinds"], there["kinds"]) == 0


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _flat(each)]
    return [np.ravel(np.asarray(value, np.float64))]
