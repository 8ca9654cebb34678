"""`fit` with parameter servers and one worker trains what plain Keras does."""

import numpy as np
import pytest

from tests.helpers import tiers
from tests.multiprocess import harness

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """Returns a function: case -> its results, of a run of all cases of the same tier."""
    done = {}

    def find(case):
        if (tier := tier_of(case)) not in done:
            cases = [each for each in FIT_CASES if tier_of(each) == tier]
            done[tier] = harness.run_roles("ps_fit_program", tmp_path_factory.mktemp("ps_fit"), 1, *cases)[0]
        return done[tier][case]

    return find


# The placement first, on servers that no other model has filled.
FIT_CASES = [
    "placement",
    "arrays",
    "validation_split_nadam",
    "validation_data_both",
    "dataset",
    "stored",
    "steps",
    "runs_out",
    "initial_epoch_sample_weight",
    "executions",
    "generator",
    "class_weight",
    "added_losses_momentum",
    "schedule",
    "adamw_clip_ema",
    "stopping",
    "rates",
    "several",
    "texts",
    "rows",
    "own_step",
    "two_optimizers",
    "inside",
    "on_batches",
    "amid",
    "predict_first",
    "own_loss",
    "nan",
    "masks",
    "output_losses",
]
# Each of these goes the way of others: the first ones of executions, texts, amid and predict_first.
FULL = (
    "arrays",
    "dataset",
    "inside",
    "runs_out",
    "initial_epoch_sample_weight",
    "added_losses_momentum",
    "rates",
    "several",
    "own_loss",
    "two_optimizers",
    "generator",
    "predict_first",
)
SLOW = ("validation_split_nadam", "steps", "class_weight", "schedule", "stopping", "own_step", "on_batches")
PARITY = tiers.cases(
    [case for case in FIT_CASES if case not in ("placement", "masks", "output_losses")],
    quick=[case for case in FIT_CASES if case not in (*FULL, *SLOW)],
    slow=SLOW,
)


def tier_of(case):
    return "slow" if case in SLOW else "full" if case in FULL else "quick"


@pytest.mark.parametrize("case", PARITY)
def test_fit_with_one_worker_equals_plain_keras(parity, case):
    mine, plain = parity(case)
    assert not isinstance(mine, str), mine
    assert mine["epoch"] == plain["epoch"]
    assert list(mine["history"]) == list(plain["history"])
    for name in mine["history"]:
        assert np.allclose(mine["history"][name], plain["history"][name], rtol=0, atol=1e-6, equal_nan=True), name
    assert len(mine["variables"]) == len(plain["variables"])
    for (path, value), expected in zip(mine["variables"].items(), plain["variables"].values(), strict=True):
        if case == "generator" and path.endswith("iteration"):
            assert value == 4  # plain Keras counts one more, at which it finds no data
        else:
            assert np.allclose(value, expected, rtol=0, atol=1e-6), path
    assert mine.get("iterations") == plain.get("iterations")
    if "predictions" in mine:
        assert list(mine["predictions"]) == list(plain["predictions"])
        for name, found in mine["predictions"].items():
            assert np.allclose(found, plain["predictions"][name], rtol=0, atol=1e-6), name


def test_no_case_is_left_out(parity):
    assert set(FIT_CASES) == parity("known")


def test_by_bytes_places_each_variable_on_the_least_loaded_server(parity):
    placed = parity("placement")
    loads, started = [0, 0], None
    for nbytes, server in placed:
        if started is None:  # what was there before is not known here
            started = server
        loads[server] += nbytes
    assert max(size for size, _ in placed) * 2 > sum(loads)
    largest = max(placed)[1]
    after = placed[[size for size, _ in placed].index(max(placed)[0]) + 1]
    assert after[1] != largest, "the one after the largest goes to the other server"


def test_the_losses_of_single_outputs_are_means_over_examples(parity):
    logged, means = parity("output_losses")
    assert logged == pytest.approx(means, rel=1e-5)


def test_each_step_has_masks_of_its_own_and_the_same_again(parity):
    first, second = (np.array(masks) for masks in parity("masks"))
    assert len(first) == 8 and len(np.unique(first, axis=0)) == 8
    assert np.array_equal(first, second)
