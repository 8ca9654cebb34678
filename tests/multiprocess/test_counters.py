"""An integer variable holds what one process would count, or a sentence says why it cannot."""

import pytest

STRATEGIES = ["one_device", pytest.param("mirrored", marks=pytest.mark.full), "multi_worker_mirrored"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("examples", 29),
        ("in executions", 29),
        ("numbers", 8 * 3 - sum(range(29))),
        ("direct", sum(range(29))),
        ("plain", 0),  # each replica's own is left alone
        ("calls", 8),
        ("sometimes", 4),
    ],
)
def test_it_counts_what_one_process_would(runs, strategy, case, count):
    for results in runs(strategy, "counters_program")[0]:
        assert results[case] == count


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_what_is_no_sum_is_refused_with_its_name(runs, strategy):
    for results in runs(strategy, "counters_program")[0]:
        assert "The integer weight" in results["largest"] and "/count is assigned" in results["largest"]
        assert "/count" in str(results["hidden"])
