"""Last batches that leave replicas without examples train, evaluate and predict what a plain loop does."""

import pytest

# Every run of the program takes some minutes on two cores.
pytestmark = pytest.mark.timeout(900)

QUICK = ["convolution", "statistics", "averaged_statistics", "functions"]
SLOW = [
    "compiled_convolution",
    "eager_convolution",
    "recurrence",
    "executions_of_two",
    "synchronized_statistics",
    "functions_in_executions",
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "multi_worker_mirrored"])
def test_replicas_without_examples_change_nothing(runs, strategy, case):
    alike = QUICK if case in QUICK else SLOW
    for results in runs(strategy, "tails_program", *alike)[0]:
        for differences in results[case]:
            assert max(differences.values()) < 2e-6, differences
