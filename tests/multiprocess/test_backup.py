"""Processes that are killed at any moment: the finished run equals the one that was never interrupted."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.helpers import fork_server
from tests.helpers.launched_job import until
from tests.helpers.once import Once
from tests.multiprocess import harness
from tfdist.backup.storage import Storage
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

pytestmark = pytest.mark.timeout(900)

by_grpc = pytest.fixture(scope="module", autouse=True)(harness.by_grpc)

WORKERS = {"mirrored": 1, "multi_worker_mirrored": 2}
STEPS, SAVE_FREQ, EPOCHS = 10, 7, 3


def run(strategy: str, out: pathlib.Path, workers: int = 0, ps: int = 0, max_restarts: int = 9, **options: Any):
    """Runs `backup_program`; returns the exit code, what was shown, and each rank's results."""
    command = fork_server.command("tests.multiprocess.backup_program", strategy, str(out), json.dumps(options))
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    shown = io.BytesIO()
    workers = workers or WORKERS[strategy]
    launcher = Launcher(
        Options(
            ["timeout", "-k", "5", "300", *command],
            local_cluster(workers, ps),
            out / "logs",
            environ,
            max_restarts=max_restarts,
        ),
        output=shown,
    )
    out.mkdir(parents=True, exist_ok=True)
    code = launcher.run()
    text = shown.getvalue().decode()
    return code, text, [harness.load(out, rank) for rank in range(1 if ps else workers)] if code == 0 else []


def differences(mine: Any, other: Any, path: str = "") -> list[str]:
    """Names what is not equal to the bit."""
    if isinstance(other, dict):
        if set(mine) != set(other):
            return [f"{path}: {sorted(mine)} and {sorted(other)}"]
        return [d for key in other for d in differences(mine[key], other[key], f"{path}/{key}")]
    if isinstance(other, (list, tuple)):
        if len(mine) != len(other):
            return [f"{path}: {len(mine)} and {len(other)}"]
        return [d for i, (a, b) in enumerate(zip(mine, other, strict=True)) for d in differences(a, b, f"{path}/{i}")]
    equal = np.array_equal(np.asarray(mine), np.asarray(other), equal_nan=np.asarray(other).dtype.kind == "f")
    return [] if equal else [f"{path}: {mine} and {other}"]


def check_equal(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, other in zip(results, expected, strict=True):
        assert differences(trained(mine), trained(other)) == []


def trained(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name not in ("restarts", "saved")}


def lives(out: pathlib.Path, rank: int = 0) -> list[list[int]]:
    """Returns the steps of each life, numbered from the begin of the training."""
    found: dict[int, list[int]] = {}
    for line in (out / f"steps-{rank}").read_text().splitlines():
        life, epoch, batch = map(int, line.split())
        found.setdefault(life, []).append(epoch * STEPS + batch)
    return list(found.values())


@pytest.fixture(scope="module")
def uninterrupted(once):
    """Returns a function: strategy -> the results of a run without a kill, nor a backup."""
    return functools.partial(run_uninterrupted, once)


def run_uninterrupted(once: Once, strategy: str) -> list[dict[str, Any]]:
    """Returns the results of a run without a kill, nor a backup, whose gradients travel over gRPC."""

    def fill(folder: pathlib.Path) -> None:
        with contextlib.contextmanager(harness.by_grpc)():
            code, text, _ = run(strategy, folder, save_freq=0)
        assert code == 0, text

    return harness.load_all(once.folder(f"backup_program {strategy}", fill))


def schedule(strategy: str, seed: int) -> list[list[Any]]:
    """Returns a rank, a moment and how often it comes before the kill, for each of two or three lives."""
    rng = random.Random(seed)
    kills: list[list[Any]] = []
    for _ in range(rng.randint(2, 3)):
        moment = rng.choice(["step", "step", "test", "part", "torn", "written", "manifest"])
        rank = 0 if moment == "manifest" else rng.randrange(WORKERS[strategy])
        kills.append([rank, moment, rng.randint(2, 12) if moment == "step" else rng.randint(1, 3)])
    return kills


def check_schedule(strategy: str, seed: int, out: pathlib.Path, expected: list[dict[str, Any]]) -> None:
    code, text, results = run(strategy, out, save_freq=SAVE_FREQ, kills=schedule(strategy, seed))
    assert code == 0, text
    check_equal(results, expected)
    backed_up = -1
    for before, after in zip(lives(out), lives(out)[1:], strict=False):
        repeated = before[-1] + 1 - after[0]
        assert 0 <= repeated <= 2 * SAVE_FREQ, text
        assert after[0] > 0 or backed_up < 0, "never from the beginning once there is a backup"
        backed_up = max(backed_up, after[0] - 1)
    check_files(out, len(results))


def check_files(out: pathlib.Path, ranks: int) -> None:
    """There are the files that manifests name, and no others."""
    storage = Storage(str(out / "backup"), 0, ranks)
    expected = {"checkpoint"}
    assert 1 <= len(storage.points()) <= 2
    for point in storage.points():
        expected |= {f"{point.folder}/{name}" for name in (*storage.read_manifest(point)["files"], "manifest.json")}
    found = {str(path.relative_to(out / "backup")) for path in (out / "backup").rglob("*") if path.is_file()}
    assert found == expected


# Chosen so that each moment comes up: see `test_the_schedules_know_every_moment`.
SEEDS = range(100, 120)
DEFAULT = [("mirrored", 2)]


@pytest.mark.parametrize(("strategy", "seed"), DEFAULT)
def test_a_run_that_was_killed_equals_one_that_was_not(strategy, seed, tmp_path, uninterrupted):
    check_schedule(strategy, seed, tmp_path, uninterrupted(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", WORKERS)
def test_so_it_does_on_any_schedule(strategy, seed, tmp_path, uninterrupted):
    check_schedule(strategy, seed, tmp_path, uninterrupted(strategy))


def test_the_schedules_know_every_moment():
    moments = {kill[1] for strategy, seed in DEFAULT for kill in schedule(strategy, seed)}
    assert {"step", "manifest"} <= moments
    every = {kill[1] for strategy in WORKERS for seed in SEEDS for kill in schedule(strategy, seed)}
    assert every == {"step", "test", "part", "torn", "written", "manifest"}


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([[1, "step", 17]], id="worker"),
        pytest.param([[1, "step", 17], [0, "step", 3]], id="worker and chief", marks=pytest.mark.full),
    ],
)
def test_sigterm_to_one_rank_saves_on_all_and_loses_no_step(tmp_path, uninterrupted, kills):
    code, text, results = run("multi_worker_mirrored", tmp_path, save_freq=1000, kills=kills, signal=15, max_restarts=1)
    assert code == 0, text
    check_equal(results, uninterrupted("multi_worker_mirrored"))
    for rank in range(2):
        assert list(itertools.chain(*lives(tmp_path, rank))) == list(range(EPOCHS * STEPS)), "each step once"
    assert len(lives(tmp_path)) == 1 + len(kills)
    assert text.count("starting again from step") == len(kills)


COMPRESSION = {
    "conv2d": {"name": "powersgd", "matrix_approximation_rank": 1, "start_powerSGD_iter": 4},
    "dense/kernel": {"name": "topk", "compress_ratio": 0.05},
}


def test_workers_that_train_alone_are_the_same_after_a_kill(tmp_path):
    """Killed between two exchanges: their weights, a teacher's and slots differ, beside the anchor, the outer momentum and what a compressor feeds back."""
    how = {"compression": COMPRESSION, "sync_every": 4, "teacher": True}
    code, text, expected = run("multi_worker_mirrored", tmp_path / "whole", save_freq=0, **how)
    assert code == 0, text
    code, text, results = run(
        "multi_worker_mirrored", tmp_path / "killed", save_freq=SAVE_FREQ, kills=[[1, "step", 17]], **how
    )
    assert code == 0, text
    assert results[0]["restarts"] == 1
    check_equal(results, expected)


@pytest.mark.full
def test_errors_that_are_fed_back_are_the_same_after_a_kill(tmp_path):
    """Also where the gradients travel in other buckets from then on."""
    how = {"compression": COMPRESSION}
    code, text, expected = run("multi_worker_mirrored", tmp_path / "whole", save_freq=0, **how)
    assert code == 0, text
    how |= {"kills": [[1, "part", 2], [0, "step", 9]], "bucket_bytes": [0, 1000, 100_000]}
    code, text, results = run("multi_worker_mirrored", tmp_path / "killed", save_freq=SAVE_FREQ, **how)
    assert code == 0, text
    assert results[0]["restarts"] == 2
    check_equal(results, expected)
    powersgd, q, topk = zip(*(rank["errors"] for rank in results), strict=True)
    assert not np.array_equal(*powersgd) and not np.array_equal(*topk), "each rank has its own"
    np.testing.assert_array_equal(*q)


@pytest.mark.full
@pytest.mark.parametrize("data", ["off", "own_rows"])
def test_data_of_which_each_worker_has_its_own_resume_where_they_were(data, tmp_path):
    code, text, expected = run("multi_worker_mirrored", tmp_path / "whole", save_freq=0, data=data)
    assert code == 0, text
    kills = [[1, "step", 13 + 4]]  # an epoch has 13 steps: 200 examples of the first worker, in pieces of 16
    code, text, results = run("multi_worker_mirrored", tmp_path / "killed", save_freq=SAVE_FREQ, data=data, kills=kills)
    assert code == 0, text
    assert results[0]["restarts"] == 1 and "exact" not in text
    check_equal(results, expected)


@pytest.mark.full
@pytest.mark.parametrize("data", ["py_dataset", "py_dataset_by_items", "py_dataset_with_workers", "generator"])
def test_data_from_python_resume_where_they_were(data, tmp_path):
    code, text, expected = run("multi_worker_mirrored", tmp_path / "whole", save_freq=0, data=data)
    assert code == 0, text
    kills = [[1, "step", STEPS + 6]]
    code, text, results = run("multi_worker_mirrored", tmp_path / "killed", save_freq=SAVE_FREQ, data=data, kills=kills)
    assert code == 0, text
    assert results[0]["restarts"] == 1 and "exact" not in text
    check_equal(results, expected)


@pytest.mark.slow
def test_files_that_are_shuffled_and_interleaved_come_in_the_same_order(tmp_path):
    """A shuffle below another one begins a new order when it is read, not when an iterator is made."""
    how = {"data": "interleave"}
    code, text, expected = run("multi_worker_mirrored", tmp_path / "whole", save_freq=0, **how)
    assert code == 0, text
    how["kills"] = [[1, "step", 2 * STEPS + 4]]
    code, text, results = run("multi_worker_mirrored", tmp_path / "killed", save_freq=SAVE_FREQ, **how)
    assert code == 0, text
    assert results[0]["restarts"] == 1 and "exact" not in text
    check_equal(results, expected)


@pytest.mark.slow
def test_four_ranks_share_a_folder(tmp_path):
    code, text, _ = run("multi_worker_mirrored", tmp_path, workers=4, save_freq=3, epochs=1)
    assert code == 0, text
    check_files(tmp_path, 4)


@pytest.mark.full
def test_parameter_servers_count_each_step_once_whichever_process_is_killed(tmp_path):
    kills = [["ps:1", "step", 17], [0, "step", 9], ["worker:1", "step", 2]]
    code, text, results = run("parameter_server", tmp_path, workers=2, ps=2, save_freq=SAVE_FREQ, kills=kills)
    assert code == 0, text
    assert int(results[0]["variables"]["adam/iteration"][0]) == EPOCHS * STEPS
    assert results[0]["epochs"] == list(range(EPOCHS))
    assert results[0]["restarts"] == 3
    assert "of worker:1 alone" in text
    check_files(tmp_path, 1)


@pytest.mark.parametrize(
    "suspended",
    [0, pytest.param(7, marks=pytest.mark.full)],  # longer than a task waits for the answer to its message
    ids=["", "while the chief is suspended"],
)
def test_sigterm_to_a_server_alone_has_the_chief_save(suspended, tmp_path):
    options = {"save_freq": 10**6, "epochs": 10, "kills": [["ps:1", "step", 17]], "signal": 15, "suspended": suspended}
    code, text, results = run("parameter_server", tmp_path, workers=2, ps=2, max_restarts=1, **options)
    assert code == 0, text
    assert list(itertools.chain(*lives(tmp_path))) == list(range(10 * STEPS)), "each step once"
    assert len(lives(tmp_path)) == 2
    assert int(results[0]["variables"]["adam/iteration"][0]) == 10 * STEPS
    assert "chief:0 ended after SIGTERM" in text


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ps"), [("multi_worker_mirrored", 0), ("parameter_server", 1)])
def test_sigterm_to_the_supervisor_saves_the_very_step(strategy, ps, tmp_path):
    options = json.dumps({"save_freq": 10**6, "epochs": 10**4, "warm": True})
    program = [sys.executable, "-m", "tests.multiprocess.backup_program", strategy, str(tmp_path), options]
    flags = ["--workers=2", f"--ps={ps}", f"--log_dir={tmp_path / 'logs'}"]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with subprocess.Popen([sys.executable, "-m", "tfdist.launch", *flags, "--", *program], env=environ) as process:
        steps = tmp_path / "steps-0"
        until(lambda: steps.exists() and steps.read_text().count("\n") > 15, 120)
        began = time.monotonic()
        process.terminate()
        assert process.wait(timeout=60) == 75
        assert time.monotonic() - began < 25
    storage = Storage(str(tmp_path / "backup"), 0, 1 if ps else 2)
    position = storage.read_manifest(storage.points()[0])["position"]
    assert position["step"] == steps.read_text().count("\n"), "not a step is lost"
