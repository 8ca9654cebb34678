"""An integer variable holds what one process would count, or a sentence says why it cannot."""

import pytest

from tests.helpers import tiers

STRATEGIES = ["one_device", pytest.param("mirrored", marks=pytest.mark.full), "multi_worker_mirrored"]
ONCE = {
    "plain": 0,  # each replica's own is left alone
    "calls": 8,
    "sometimes": 4,
}
OF_DATA = {
    "examples": 29,
    "full batches": 28,
    "in executions": 29,
    "numbers": 8 * 3 - sum(range(29)),
    "direct": sum(range(29)),
    "largest": 28,
    "hidden": 0,  # no batch begins with 2
}
# They go the way of "examples"; tests/replicas/test_equal_weights.py has full batches, too.
FULL = ("full batches", "numbers", "largest")
QUICK = [case for case in (*ONCE, *OF_DATA) if case not in FULL]


@pytest.fixture
def count(runs):
    """Returns a function: strategy, case -> what each rank has counted, of a run of all cases of the same tier."""

    def find(strategy, case):
        return [results[case] for results in runs(strategy, "counters_program", *(FULL if case in FULL else QUICK))[0]]

    return find


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("case", "expected"), ONCE.items())
def test_it_counts_what_one_process_would(count, strategy, case, expected):
    for found in count(strategy, case):
        assert found == expected


@pytest.mark.parametrize("case", tiers.cases(OF_DATA, quick=QUICK))
def test_one_process_counts_what_depends_on_the_data(count, case):
    assert count("one_device", case) == [OF_DATA[case]]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("case", tiers.cases(OF_DATA, quick=QUICK))
def test_what_depends_on_the_data_is_refused_with_its_name(count, strategy, case):
    for found in count(strategy, case):
        assert "/count" in str(found)
        assert case == "hidden" or ("The integer weight" in found and "is assigned" in found)
