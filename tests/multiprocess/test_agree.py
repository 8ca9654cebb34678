"""Workers do together what one of them alone has a reason to do."""

import numpy as np
import pytest


def test_a_rate_that_the_chief_sets_before_a_step_holds_on_all_workers_in_it(runs):
    for results in runs("multi_worker_mirrored", "agree_program")[0]:
        x, y, rates, trained = results["rates_of_the_chief"]
        weights = np.zeros((3, 1))
        for number, rate in enumerate(rates):
            xs, ys = (each[8 * number : 8 * number + 8].astype(np.float64) for each in (x, y))
            weights -= rate * 2 * xs.T @ (xs @ weights - ys) / 8
        assert trained == pytest.approx(weights, abs=1e-6)


def test_statistics_that_one_worker_has_forgotten_are_averaged_by_none(runs):
    for results in runs("multi_worker_mirrored", "agree_program")[0]:
        assert results["a_model_that_one_worker_has_forgotten"] == ([1.5, 15.0], 2)


def test_bytes_of_any_length_reach_the_ranks_that_receive_them(runs):
    for rank, results in enumerate(runs("multi_worker_mirrored", "agree_program")[0]):
        receives = [rank == 0, rank == 1, rank == 0, rank == 1]
        for expects, (received, sent) in zip(receives, results["bytes_that_are_sent"], strict=True):
            assert received == (sent if expects else None)
