"""Libraries that replace `fit`, such as MLflow's `autolog`, are called before and after a Trainer is made, around its own `fit`."""

import numpy as np
import pytest

from tests.helpers.tiers import cases
from tests.multiprocess import harness

pytestmark = pytest.mark.timeout(600)


CASES = [
    ("mirrored", "before", "own"),
    ("multi_worker_mirrored", "before", "own"),
    ("mirrored", "after", "own"),
    ("mirrored", "before", "mlflow"),
]


@pytest.mark.parametrize(("strategy", "when", "library"), cases(CASES, 3))
def test_replaced_methods_are_called(tmp_path, strategy, when, library):
    if library == "mlflow":
        pytest.importorskip("mlflow")
    right = np.mean(np.arange(6.0) ** 2)
    for result in harness.run("autolog_program", strategy, tmp_path / "out", when, library):
        assert result["called"] == ["fit", "fit", "evaluate", "predict", "fit"]
        np.testing.assert_allclose([*result["losses"], result["evaluated"]], [right] * 4, rtol=1e-5)
        np.testing.assert_allclose(result["predicted"][:, 0], np.arange(6), rtol=1e-5)
        np.testing.assert_allclose(result["runs"], [right] * (3 if library == "mlflow" else 0), rtol=1e-5)
