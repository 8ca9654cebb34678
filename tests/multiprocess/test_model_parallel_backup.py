"""Trainings whose variables live as pieces resume from their backups: to the bit, in another mesh, and on one device."""

import shutil

import pytest

from tests.multiprocess import harness
from tfdist.runtime.end.process_end import PREEMPTED

WORKERS = "multi_worker_mirrored"
PROGRAM = "model_parallel_backup_program"
STEPS = 40


EPOCHS = 2
SIZES = {"1x1": 1, "1x2": 2, "2x1": 2, "2x2": 4}


def train(runs, mesh, case, folder="", interruption="", strategy=WORKERS, epochs=EPOCHS, size=0):
    arguments = mesh, case, str(folder), interruption, str(epochs)
    ranks, _ = runs(strategy, PROGRAM, *arguments, size=size or SIZES[mesh])
    return ranks


def interrupted(runs, mesh, case, tmp_path):
    """Returns the backups of a training that ends after SIGTERM on its last rank, and the number of its steps."""
    folder = tmp_path / "interrupted"
    ranks = train(runs, mesh, case, folder, f"SIGTERM-{SIZES[mesh] - 1}")
    assert {rank["code"] for rank in ranks} == {PREEMPTED}
    (steps,) = {rank["steps"] for rank in ranks}
    assert steps < STEPS
    return folder, steps


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "case"),
    [(mesh, case) for mesh in ("1x2", "2x2") for case in ("batch_norm-adamw", "dropout-averages")],
)
def test_a_training_resumes_to_the_bit(runs, tmp_path, mesh, case):
    whole = train(runs, mesh, case, tmp_path / "whole")
    folder, steps = interrupted(runs, mesh, case, tmp_path)
    resumed = train(runs, mesh, case, folder)
    check_equal(resumed, whole, {STEPS - steps})


def check_equal(resumed, whole, steps):
    """Compares what a resumed training has come to, after one of `steps`, with an undisturbed one."""
    for rank, undisturbed in zip(resumed, whole, strict=True):
        assert rank["steps"] in steps
        assert harness.difference(rank["weights"], undisturbed["weights"]) == 0
        assert harness.difference(rank["slots"], undisturbed["slots"]) == 0


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "killed"), [("1x2", 1), ("2x2", 0), ("2x2", 3)])
def test_a_training_with_a_killed_worker_ends_with_the_same_bits(runs, tmp_path, mesh, killed):
    case = "batch_norm-adamw"
    whole = train(runs, mesh, case, tmp_path / "whole")
    folder, out = tmp_path / "backups", tmp_path / "out"
    out.mkdir()
    arguments = mesh, case, str(folder), f"SIGKILL-{killed}", str(EPOCHS)
    resumed = harness.run(PROGRAM, WORKERS, out, *arguments, size=SIZES[mesh], restarts=1)
    assert (out / "sent").exists()
    check_equal(resumed, whole, {STEPS - 3, STEPS - 6})  # the newest complete backup


def test_a_training_continues_in_another_mesh_and_on_one_device(runs, tmp_path):
    case = "batch_norm"
    (stock,) = train(runs, "1x1", case, strategy="stock")
    folder, steps = interrupted(runs, "2x2", case, tmp_path)
    for mesh, strategy in (("1x2", WORKERS), ("2x1", WORKERS), ("1x1", "one_device")):
        copy = tmp_path / mesh
        shutil.copytree(folder, copy)
        for rank in train(runs, mesh, case, copy, strategy=strategy):
            assert rank["steps"] == STEPS - steps
            assert harness.difference(rank["weights"], stock["weights"]) < 1e-5
            assert harness.difference(rank["slots"], stock["slots"]) < 1e-5


@pytest.mark.full
def test_values_that_are_split_in_one_way_continue_split_in_another(runs, tmp_path):
    """An epoch each: a mesh, ranges of slots on three workers and on two, a mesh, and one device."""
    ways = [("1x2", 2), ("slots", 3), ("slots", 2), ("1x2", 2), ("1x1", 1)]
    (stock,) = train(runs, "1x1", "dense", strategy="stock", epochs=len(ways))
    for epoch, (split, size) in enumerate(ways, 1):
        strategy = WORKERS if size > 1 else "one_device"
        ranks = train(runs, split, "dense", tmp_path / "backups", strategy=strategy, epochs=epoch, size=size)
        assert {rank["steps"] for rank in ranks} == {STEPS // EPOCHS}
    assert harness.difference(ranks[0]["weights"], stock["weights"]) < 1e-5
    assert harness.difference(ranks[0]["slots"], stock["slots"]) < 1e-5
