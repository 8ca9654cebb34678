"""As many replicas train to the same bits in any number of processes: in one, one for each, or several with some each."""

import json
import re

import pytest

from tests.helpers import tiers
from tests.multiprocess import harness

pytestmark = pytest.mark.timeout(900)

CASES = (
    "cnn",
    "synchronized_normalization",
    "gru",
    "transformer",
    "embedding",
    "batches_without_rest",
    "executions",
    "accumulation",
    "global_clipnorm",
    "loss_of_one_number",
    "function_of_epochs",
    "data_of_unknown_size",
    "mixed_bfloat16",
)
COMPRESSIONS = ("none", "bf16", "int8", "powersgd")
TRAININGS = [f"{case}:{compression}" for compression in COMPRESSIONS for case in CASES]
SIX = ("cnn:none",)  # with six replicas
QUICK = ("cnn:int8", "transformer:powersgd", "embedding:bf16", "executions:none")
# Workers, the devices of each, and how their gradients travel; one alone sends none.
QUICK_CLUSTERS = ((2, 2, "shared_memory"), (4, 1, "grpc"))
CLUSTERS = (*QUICK_CLUSTERS, (2, 2, "grpc"), (4, 1, "shared_memory"), (1, 4, "grpc"))
CLUSTERS_OF_SIX = ((6, 1, "shared_memory"), (6, 1, "grpc"), (3, 2, "shared_memory"), (3, 2, "grpc"), (1, 6, "grpc"))


def together(training):
    """Returns the trainings that the same processes run: those of the first tier, or of the same compression."""
    if training in QUICK:
        return QUICK
    compression = training.partition(":")[2]
    return [each for each in TRAININGS if each not in QUICK and each.endswith(f":{compression}")]


EVERY = [(*cluster, training) for cluster in CLUSTERS for training in TRAININGS]
QUICK_ONES = [(*cluster, training) for cluster in QUICK_CLUSTERS for training in QUICK]


def check_alike(runs, workers, devices, transport, training, group):
    """Compares each worker with one process that has all replicas."""
    (expected,) = runs("mirrored", "any_size_program", str(workers * devices), *group)[0]
    how = {"size": workers, "transport": transport}
    ranks = runs("multi_worker_mirrored", "any_size_program", str(devices), *group, **how)[0]
    assert len(ranks) == workers
    for results in ranks:
        assert results["transport"] == transport
        for kind, found in results[training].items():
            assert found == expected[training][kind], kind


@pytest.mark.parametrize(("workers", "devices", "transport", "training"), tiers.cases(EVERY, QUICK_ONES))
def test_four_replicas_train_to_the_same_bits_in_any_processes(runs, workers, devices, transport, training):
    check_alike(runs, workers, devices, transport, training, together(training))


@pytest.mark.full
@pytest.mark.parametrize(("workers", "devices", "transport"), CLUSTERS_OF_SIX)
def test_so_do_six(runs, workers, devices, transport):
    check_alike(runs, workers, devices, transport, *SIX, SIX)


def test_the_trainings_differ_and_learn(runs):
    """Or nothing here could fail."""
    (found,) = runs("mirrored", "any_size_program", "4", *QUICK)[0]
    for training in QUICK:
        losses = json.loads(found[training]["history"])["loss"]
        assert len(losses) == 3 and losses[-1] < losses[0] < 10, training
        hashes = [*found[training]["weights"].values(), *found[training]["optimizer"].values()]
        assert len(hashes) > 6 and len({*hashes}) > len(hashes) / 2, training


def test_no_case_is_left_out():
    program = (harness.ROOT / "tests/multiprocess/any_size_program.py").read_text()
    assert tuple(re.findall(r"^@case\ndef (\w+)", program, re.MULTILINE)) == CASES
    assert {*QUICK, *SIX} < {*TRAININGS}
