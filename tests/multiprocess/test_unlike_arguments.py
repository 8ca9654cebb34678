"""What workers must be given alike is judged before training, on all of them."""

import io
import os

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher

ORDER = "The dataset must yield the same elements in the same order on all workers, because each worker trains on its share. Received:"

PROGRAM = "All workers must run the same program. Received:"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("lengths", "length of x must be the same on all workers of a fit. Received: 64 on worker:0, 48 on worker:1."),
        ("epochs", "epochs must be the same on all workers of a fit. Received: 1 on worker:0, 2 on worker:1."),
        ("validation", "validation_data given (1) or None (0) must be the same"),
        ("batches", "length of x must be the same on all workers of a fit. Received: 4 on worker:0, 3 on worker:1."),
        ("shuffled", f"{ORDER} shuffle(buffer_size=64, seed="),
        ("batched", f"{ORDER} batch(batch_size=16) on worker:0, batch(batch_size=17) on worker:1. Seeds differ if"),
        ("sampled", f"{ORDER} random(seed="),
        (
            "width",
            f"{PROGRAM} the model's layer 1 (Dense): units is 5 on worker:1, and 4 on worker:0. Start all with the same",
        ),
        ("dropout", f"{PROGRAM} the model's layer 2 (Dropout): rate is 0.5 on worker:1, and 0.2 on worker:0."),
        ("loss", f"{PROGRAM} the model's loss is 'mae' on worker:1, and 'mse' on worker:0."),
        ("learning_rate", f"{PROGRAM} the optimizer: learning_rate is 0.01 on worker:1, and 0.1 on worker:0."),
        ("argument", f"{PROGRAM} the script's argument --scale is 0.7 on worker:1, and 0.5 on worker:0."),
        ("alike", ""),
        ("harmless", ""),
        ("seeded", ""),
    ],
)
def test_all_workers_say_what_differs(runs, case, sentence):
    for results in runs("multi_worker_mirrored", "unlike_arguments_program")[0]:
        assert results[case].startswith(sentence) and bool(results[case]) == bool(sentence), results[case]


def test_another_model_is_told_as_its_variables_are_made_and_is_not_started_again(tmp_path):
    command = fork_server.command(
        "tests.multiprocess.unlike_arguments_program", "multi_worker_mirrored", str(tmp_path), "width"
    )
    shown, environ = io.BytesIO(), {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    launcher = Launcher(
        ["timeout", "300", *command], local_cluster(2), tmp_path / "logs", environ, output=shown, max_restarts=2
    )
    assert launcher.run() == 1
    said = shown.getvalue().decode()
    assert (
        "ConfigError: All workers must build the same model. Received: variable sequential_1/dense_1/kernel, of" in said
    )
    assert "an invalid command line or configuration would fail again; ending all tasks" in said
    assert "restart 1/2" not in said
