"""Backups and saved models of a training with split slots are those of one with whole slots: each continues in the other way."""

import pytest

from tests.helpers import tiers

QUICK = ("adam",)
OTHERS = ("sgd", "nadam", "amsgrad", "loss_scale", "overwriting_averages")
TRAININGS = [(workers, case) for workers in (2, 3, 1) for case in (*QUICK, *OTHERS)]  # one worker with two devices

trainings = pytest.mark.parametrize(("workers", "case"), TRAININGS)


def run(runs, part, workers, case):
    """Returns each rank's results of a case."""
    strategy = "mirrored:2" if workers == 1 else "multi_worker_mirrored"
    ways = "1" if case in QUICK else "2"
    found, _ = runs(strategy, "sharded_backup_program", part, ways, case, size=workers)
    return [results[case] for results in found]


@pytest.mark.parametrize(("workers", "case"), tiers.cases(TRAININGS, len(QUICK)))
def test_a_training_resumed_in_either_way_has_the_same_bits(runs, workers, case):
    for resumed in run(runs, "resumed", workers, case):
        assert len(resumed["whole"][1]) == 3
        assert len(resumed) >= 3
        for ways, trained in resumed.items():
            assert trained == resumed["whole"], ways


@pytest.mark.full
@trainings
def test_plain_keras_continues_from_a_saved_model(runs, workers, case):
    for results in run(runs, "saved", workers, case):
        assert results["loaded"]["sharded"] == results["loaded"]["whole"]


@pytest.mark.full
@trainings
def test_a_saved_model_continues_with_split_slots(runs, workers, case):
    for results in run(runs, "saved", workers, case):
        assert results["continued"]["sharded"] == results["continued"]["whole"]
        assert results["kept"]["sharded"] < results["kept"]["whole"]
