"""Last batches that leave replicas without examples train, evaluate and predict what a plain loop does."""

import pytest

from tests.helpers import tiers

# Every run of the program takes some minutes on two cores.
pytestmark = pytest.mark.timeout(900)

QUICK = ["statistics", "averaged_statistics", "functions"]
# "functions" has the model of the first and "statistics" its data, "averaged_statistics" the batches of the second.
FULL = ["convolution", "statistics_of_unequal_shares"]
SLOW = [
    "compiled_convolution",
    "eager_convolution",
    "recurrence",
    "executions_of_two",
    "synchronized_statistics",
    "functions_in_executions",
]
CASES = tiers.cases([*QUICK, *FULL, *SLOW], QUICK, SLOW)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "multi_worker_mirrored"])
def test_replicas_without_examples_change_nothing(runs, strategy, case):
    (alike,) = (tier for tier in (QUICK, FULL, SLOW) if case in tier)
    for results in runs(strategy, "tails_program", *alike)[0]:
        for differences in results[case]:
            assert max(differences.values()) < 2e-6, differences
