"""Workers that each hold some rows of a table train the bits of replicas in one process, which hold all rows."""

import numpy as np
import pytest

from tests.helpers import tiers

QUICK = ("sgd", "lazy", "not_finite", "custom")
OTHERS = ("adagrad", "adam", "executions", "loss_scale")
CLOSE = ("shared", "compressed", "eager", "clips", "clips_scaled", "clips_compressed", "accumulates", "averages")
ERRORS = {
    "lamb": "Lamb, which is not known to update each element independently",
    "regularizer": "users with rows on the workers is not possible with embeddings_regularizer, whose sum no worker can compute",
    "saved alone": "Each worker holds a part of users/embeddings_0",
    "called": "the model is called outside of a step, perhaps on one worker alone",
}
TRAININGS = [
    *((2, 1, "", case) for case in QUICK),
    *((2, 1, "", case) for case in OTHERS),
    *((2, 2, "", case) for case in (*QUICK, *OTHERS)),
    *((3, 1, "", case) for case in (*QUICK, *OTHERS)),
    *((2, 1, "grpc", case) for case in (*QUICK, *OTHERS)),
]


def on_workers(runs, workers, devices, *cases, transport=""):
    program = ("multi_worker_mirrored", "table_program", str(devices), str(workers), *cases)
    return runs(*program, size=workers, transport=transport)[0]


def in_one_process(runs, devices, *cases):
    return runs("mirrored", "table_program", str(devices), "1", *cases)[0][0]


@pytest.mark.parametrize(("workers", "devices", "transport", "case"), tiers.cases(TRAININGS, len(QUICK)))
def test_rows_on_workers_give_the_bits_of_one_process(runs, workers, devices, transport, case):
    cases = QUICK if case in QUICK else OTHERS
    ranks = on_workers(runs, workers, devices, *cases, transport=transport)
    expected = in_one_process(runs, workers * devices, *cases)[case]
    assert ranks[0][case]["hashes"] == expected["hashes"]
    for rank in ranks:
        assert rank[case]["losses"] == expected["losses"]
        np.testing.assert_array_equal(rank[case]["predicted"], expected["predicted"])
        assert rank[case]["tested"] == expected["tested"]
        assert rank[case]["held"] == -(-65_537 // workers) * 16
    assert expected["held"] == 65_537 * 16


def test_rows_on_workers_give_the_numbers_of_one_device(runs):
    ranks = on_workers(runs, 2, 1, *QUICK)
    expected = runs("one_device", "table_program", "1", "1", "sgd")[0][0]["sgd"]
    np.testing.assert_allclose(ranks[0]["sgd"]["rows"], expected["rows"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ranks[0]["sgd"]["losses"], expected["losses"], rtol=1e-5)
    assert len(set(expected["losses"])) == 2


@pytest.mark.full
@pytest.mark.parametrize("case", CLOSE)
def test_numbers_whose_last_bits_differ(runs, case):
    """Sums of a table of several features, of squares and of accumulated gradients have another order; rows travel uncompressed."""
    found = on_workers(runs, 2, 1, *CLOSE)[0][case]
    expected = in_one_process(runs, 2, *CLOSE)[case]
    tolerance = 2e-2 if "compressed" in case else 1e-6
    np.testing.assert_allclose(found["rows"], expected["rows"], rtol=tolerance, atol=tolerance / 10)


def test_what_workers_cannot_do_with_their_rows_is_an_error(runs):
    for rank in on_workers(runs, 2, 1, *ERRORS):
        for case, message in ERRORS.items():
            assert message in rank[case]


@pytest.mark.parametrize(
    "writers", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_any_number_of_workers_restores_a_backup(runs, tmp_path_factory, writers):
    folder = tmp_path_factory.mktemp("backup") / "backup"

    def run(workers, case):
        if workers == 1:
            return runs("one_device", "table_program", "1", "1", f"{case}:{folder}")[0][0][f"{case}:{folder}"]
        return on_workers(runs, workers, 1, f"{case}:{folder}")[0][f"{case}:{folder}"]

    written = run(writers, "backup")
    assert len(set(written)) > 5
    for readers in {1, 2, 3} - {writers}:
        assert run(readers, "restore") == written
