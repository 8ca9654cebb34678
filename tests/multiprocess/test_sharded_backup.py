"""Backups and saved models of a training with split slots are those of one with whole slots: each continues in the other way."""

import pytest

from tests.helpers import tiers

QUICK = ("adam",)
OTHERS = ("sgd", "nadam", "amsgrad", "loss_scale", "overwriting_averages")
TRAININGS = [(workers, case) for workers in (2, 3, 1) for case in (*QUICK, *OTHERS)]  # one worker with two devices

trainings = pytest.mark.parametrize(("workers", "case"), tiers.cases(TRAININGS, len(QUICK)))


def run(runs, workers, case):
    """Returns each rank's results of a case."""
    arguments = (case, "1" if case in QUICK else "2")
    strategy = "mirrored:2" if workers == 1 else "multi_worker_mirrored"
    found, _ = runs(strategy, "sharded_backup_program", *arguments, size=workers)
    return [results[case] for results in found]


@trainings
def test_a_training_resumed_in_either_way_has_the_same_bits(runs, workers, case):
    for results in run(runs, workers, case):
        undisturbed = results["resumed"]["whole"]
        assert len(undisturbed[1]) == 3
        assert len(results["resumed"]) >= 3
        for ways, trained in results["resumed"].items():
            assert trained == undisturbed, ways


@trainings
def test_plain_keras_continues_from_a_saved_model(runs, workers, case):
    for results in run(runs, workers, case):
        assert results["loaded"]["sharded"] == results["loaded"]["whole"]


@trainings
def test_a_saved_model_continues_with_split_slots(runs, workers, case):
    for results in run(runs, workers, case):
        assert results["continued"]["sharded"] == results["continued"]["whole"]
        assert results["kept"]["sharded"] < results["kept"]["whole"]
