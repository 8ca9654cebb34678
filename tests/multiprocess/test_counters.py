"""An integer variable holds what one process would count, or a sentence says why it cannot."""

import pytest

STRATEGIES = ["one_device", pytest.param("mirrored", marks=pytest.mark.full), "multi_worker_mirrored"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("plain", 0),  # each replica's own is left alone
        ("calls", 8),
        ("sometimes", 4),
    ],
)
def test_it_counts_what_one_process_would(runs, strategy, case, count):
    for results in runs(strategy, "counters_program")[0]:
        assert results[case] == count


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("examples", 29),
        ("full batches", 28),
        ("in executions", 29),
        ("numbers", 8 * 3 - sum(range(29))),
        ("direct", sum(range(29))),
        ("largest", 28),
        ("hidden", 0),  # no batch begins with 2
    ],
)
def test_one_process_counts_what_depends_on_the_data(runs, case, count):
    assert runs("one_device", "counters_program")[0][0][case] == count


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize(
    "case", ["examples", "full batches", "in executions", "numbers", "direct", "largest", "hidden"]
)
def test_what_depends_on_the_data_is_refused_with_its_name(runs, strategy, case):
    for results in runs(strategy, "counters_program")[0]:
        assert "/count" in str(results[case])
        assert case == "hidden" or ("The integer weight" in results[case] and "is assigned" in results[case])
