"""Workers with other numbers of threads train to the same bits, whatever an optimizer sums."""

import numpy as np
import pytest

SUMMING = ("clipnorm", "global_clipnorm", "accumulated", "averaged", "scaled", "lamb", "adafactor", "muon", "own")


@pytest.fixture(scope="module")
def two(runs):
    return runs("multi_worker_mirrored", "threads_program")[0]


def test_the_workers_do_round_differently(two):
    assert two[0]["sum"] != two[1]["sum"]  # or nothing here could fail
    assert [results["difference"] for results in two] == ["threads (1, 4)"] * 2


@pytest.mark.parametrize("case", [*SUMMING, "adam", "powersgd"])
def test_their_variables_are_equal_to_the_bit(two, case):
    assert [results[case]["error"] for results in two] == ["", ""]
    assert two[0][case]["print"] == two[1][case]["print"]
    assert np.isfinite(two[0][case]["kernel"]).all()
