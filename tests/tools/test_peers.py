"""The comparison with peers: each contender runs alone in its processes, and what is not there is left out."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tools import netlab
from tools.bench import peers, record

ROOT = pathlib.Path(__file__).parents[2]
SUM_MB = 42.06  # what a worker of two sends of the MLP's gradients, float32


def needs(*modules):
    absent = [module for module in modules if not importlib.util.find_spec(module)]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed")


NEEDS_LAB = pytest.mark.skipif(bool(netlab.missing()), reason="no network namespaces")
NEEDS_MPI = pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: make system-deps")


def check(found, turns):
    """Checks times: of `turns` turns, and of a processor no more than there is."""
    assert len(found["seconds"]) == turns and min(found["seconds"]) > 0
    assert 0 < found["processor"] < 2 * len(os.sched_getaffinity(0)) * max(found["seconds"])


@NEEDS_LAB
@needs("torch")
def test_a_peer_runs_alone_in_its_processes():
    found = peers.alone("DDP powersgd r4", 2, "unlimited", turns=2, steps=2)
    assert found["libraries"] == ["torch"]
    check(found, 2)
    assert 0.2e6 < found["sent"] < 0.4e6, "both low-rank factors of the MLP, in bytes"


@NEEDS_LAB
@needs("jax")
def test_jax_sends_its_gradients_once():
    found = peers.alone("JAX", 2, "unlimited", turns=2, steps=2)
    assert found["libraries"] == ["jax"]
    check(found, 2)
    assert found["sent"] / 1e6 == pytest.approx(SUM_MB, rel=0.03)


@NEEDS_LAB
@pytest.mark.full
@needs("tf_keras")
def test_tf_keras_runs_without_keras_3_and_tfdist():
    found = peers.alone("tf_keras", 2, "unlimited", turns=2, steps=2)
    # TensorFlow imports JAX by itself, where it is installed.
    assert {"tensorflow", "tf_keras"} <= set(found["libraries"]) <= {"tensorflow", "tf_keras", "jax"}
    check(found, 2)
    assert found["sent"] / 1e6 == pytest.approx(SUM_MB, rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize(
    "transport", ["grpc", "shared_memory", "tcp", pytest.param("mpi", marks=[needs("mpi4py"), NEEDS_MPI])]
)
def test_gradients_travel_by_the_transport_that_a_contender_names(transport):
    found = peers.alone(f"bf16 by {transport}", 2, peers.HOST, turns=1, steps=1)
    assert found["transport"] == transport
    check(found, 1)


@pytest.mark.full
@needs("torch")
def test_a_contender_that_fails_does_not_end_the_others(capfd):
    case = {"model": "mlp", "workers": 2, "rate": peers.HOST}
    found = peers.run(case, 1, ["DDP of no hook", "DDP"])
    assert list(found.samples) == ["DDP"] and found.columns["processor, ms"]["DDP"] > 0
    assert "sent, MB" not in found.columns, "on one host nobody knows whose bytes they are"
    assert found.note == "DDP of no hook failed in round 1 and is left out."
    assert "DDP of no hook: worker:" in capfd.readouterr().err


def test_every_ratio_is_of_contenders_that_there_are():
    names = {name for case in peers.CASES for name in peers.contenders(case["rate"])}
    assert set(peers.PAIRS.values()) <= names
    for case in peers.CASES:
        for name in peers.contenders(case["rate"]):
            assert "is measured on" not in peers.lacks(name, case["rate"])


def test_a_transport_within_a_host_is_left_out_where_each_worker_has_one():
    assert peers.lacks("none by shared_memory", "1gbit") == "shared_memory is measured on one host only (rate=host)"


def test_what_is_not_there_is_left_out(tmp_path):
    """Said, and never made up."""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n in ('torch', 'jax') else f(n, p)"
    )
    words = ["peers", "--only=workers=2,rate=host", "--contenders=DDP,JAX", f"--out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for name, library in (("DDP", "PyTorch"), ("JAX", "JAX")):
        assert f"{name} is left out: {library} is not installed (pip install '.[peers]')\n" in done.stdout
    assert not (tmp_path / "results").exists()


@pytest.mark.full
def test_a_case_of_one_host_is_written(tmp_path):
    words = ["peers", "--only=workers=2,rate=host", "--contenders=compute,none by shared_memory", "--rounds=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *words, f"--out={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = record.read(tmp_path / "results" / "peers.jsonl")
    assert list(found.samples) == ["compute", "none by shared_memory"]
    assert "| model mlp, workers 2, rate host | ms | processor, ms |" in (tmp_path / "RESULTS.md").read_text()
