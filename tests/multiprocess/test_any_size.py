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
QUICK = ("executions:int8",)
NEXT = ("cnn:none", "synchronized_normalization:none", "transformer:powersgd")
SIX = ("cnn:none",)  # with six replicas
# Workers, the devices of each, and how their gradients travel; one alone sends none.
CLUSTERS = ((2, 2, "shared_memory"), (4, 1, "grpc"), (2, 2, "grpc"), (4, 1, "shared_memory"), (1, 4, "grpc"))
CLUSTERS_OF_SIX = ((6, 1, "shared_memory"), (6, 1, "grpc"), (3, 2, "shared_memory"), (3, 2, "grpc"), (1, 6, "grpc"))

# In `make test-all` one cluster runs a training: another one for each compression of a case, and for each case of a compression.
EVERY = [(*cluster, training) for cluster in CLUSTERS for training in TRAININGS]
QUICK_ONES = [(*CLUSTERS[0], training) for training in QUICK]
NEXT_ONES = [*((*CLUSTERS[0], training) for training in NEXT), (*CLUSTERS[1], "cnn:none"), (*CLUSTERS[1], *QUICK)]
NEXT_ONES += [(*CLUSTERS[sum(divmod(i, len(CASES))) % len(CLUSTERS)], each) for i, each in enumerate(TRAININGS)]
FULL_ONES = [each for each in dict.fromkeys(NEXT_ONES) if each not in QUICK_ONES]
SLOW_ONES = [each for each in EVERY if each not in {*QUICK_ONES, *FULL_ONES}]


def of_one_run(of_one_compression, cluster, training):
    """Returns the trainings of a cluster that the same processes run: those of a tier, in `make slow` those of one compression."""
    tier = next(ones for ones in (QUICK_ONES, FULL_ONES, SLOW_ONES) if (*cluster, training) in ones)
    found = [each for *other, each in tier if tuple(other) == cluster]
    return [each for each in found if each in of_one_compression] if tier is SLOW_ONES else found


def check_alike(runs, cluster, training, reference, group):
    """Compares each worker with one process that has all replicas. The trainings that run in the same processes: `reference`, `group`."""
    workers, devices, transport = cluster
    (expected,) = runs("mirrored", "any_size_program", str(workers * devices), *reference)[0]
    how = {"size": workers, "transport": transport}
    ranks = runs("multi_worker_mirrored", "any_size_program", str(devices), *group, **how)[0]
    assert len(ranks) == workers
    for results in ranks:
        assert results["transport"] == transport
        for kind, found in results[training].items():
            assert found == expected[training][kind], kind


@pytest.mark.parametrize(("workers", "devices", "transport", "training"), tiers.cases(EVERY, QUICK_ONES, SLOW_ONES))
def test_four_replicas_train_to_the_same_bits_in_any_processes(runs, workers, devices, transport, training):
    compression, cluster = training.partition(":")[2], (workers, devices, transport)
    alike = [each for each in TRAININGS if each not in (*QUICK, *NEXT) and each.endswith(f":{compression}")]
    reference = next((group for group in (QUICK, NEXT) if training in group), alike)
    check_alike(runs, cluster, training, reference, of_one_run(reference, cluster, training))


@pytest.mark.full
@pytest.mark.parametrize(("workers", "devices", "transport"), CLUSTERS_OF_SIX)
def test_so_do_six(runs, workers, devices, transport):
    check_alike(runs, (workers, devices, transport), *SIX, SIX, SIX)


@pytest.mark.parametrize("trainings", tiers.cases([[*QUICK], [*NEXT]], 1))
def test_the_trainings_differ_and_learn(runs, trainings):
    """Or nothing here could fail."""
    (found,) = runs("mirrored", "any_size_program", "4", *trainings)[0]
    for training in trainings:
        losses = json.loads(found[training]["history"])["loss"]
        assert len(losses) == 3 and losses[-1] < losses[0] < 10, training
        hashes = [*found[training]["weights"].values(), *found[training]["optimizer"].values()]
        assert len(hashes) > 6 and len({*hashes}) > len(hashes) / 2, training


def test_no_case_is_left_out():
    program = (harness.ROOT / "tests/multiprocess/any_size_program.py").read_text()
    assert tuple(re.findall(r"^@case\ndef (\w+)", program, re.MULTILINE)) == CASES
    assert {*QUICK, *SIX} < {*TRAININGS}
