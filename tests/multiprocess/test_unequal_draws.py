"""A vision transformer trains on two workers, of which the chief alone draws random numbers now and then."""

import numpy as np
import pytest


@pytest.mark.full
def test_the_workers_stay_in_step(runs):
    chief, worker = runs("multi_worker_mirrored", "unequal_draws_program")[0]
    np.testing.assert_array_equal(chief["predicted"], worker["predicted"])
    assert chief["history"] == worker["history"] and len(chief["history"]["val_accuracy"]) == 2
    assert chief["evaluated"] == worker["evaluated"]
    np.testing.assert_allclose(chief["evaluated"]["loss"], chief["loss"], rtol=1e-5)
