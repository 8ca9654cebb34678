"""Workers whose calls or data do not go together all end, with one sentence that says what each did."""

import io
import os
import re

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

SHORT = "A dataset has fewer batches on some workers than on others (worker:0 was in {0}, without data left; worker:1 was in {0}). Give all"
UNLIKE = "Workers did different things at once: worker:0 was in {}; worker:1 was in {}. All must make the same calls"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("fit", SHORT.format("fit, a step (train_step)")),
        pytest.param("full_batches", SHORT.format("fit, a step (train_step)"), marks=pytest.mark.full),
        pytest.param("executions", SHORT.format("fit, a step (train_step)"), marks=pytest.mark.full),
        pytest.param("validation", SHORT.format("fit, a step (test_step)"), marks=pytest.mark.full),
        pytest.param("evaluate", SHORT.format("evaluate, a step (test_step)"), marks=pytest.mark.full),
        pytest.param("predict", SHORT.format("predict"), marks=pytest.mark.full),
        ("callback", UNLIKE.format("fit, Evaluates's on_epoch_end", "fit, the trainer's on_epoch_end")),
        pytest.param("save", UNLIKE.format("evaluate", "save"), marks=pytest.mark.full),
    ],
)
def test_all_workers_say_what_each_did(runs, case, sentence):
    for results in runs("multi_worker_mirrored", "mismatched_calls_program", case)[0]:
        assert results["said"].startswith(sentence), results["said"]


def test_a_transport_that_waits_for_another_call_ends_in_the_places_of_both(runs):
    first, second = (
        results["said"] for results in runs("multi_worker_mirrored", "mismatched_calls_program", "own_steps")[0]
    )
    place = r"at tests/multiprocess/mismatched_calls_program\.py:\d+ in in_own_steps"
    verdict = f"worker:0 waits in an exchange after step 3 {place}; worker:1 waits in step 4 {place}: a deadlock"
    assert re.search(verdict, first), first
    assert second, "worker:1 ends, too"


def test_another_model_is_told_as_its_variables_are_made_and_is_not_started_again(tmp_path):
    command = fork_server.command(
        "tests.multiprocess.mismatched_calls_program", "multi_worker_mirrored", str(tmp_path), "model"
    )
    shown, environ = io.BytesIO(), {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    options = Options(["timeout", "300", *command], local_cluster(2), tmp_path / "logs", environ, max_restarts=2)
    assert Launcher(options, output=shown).run() == 2
    said = shown.getvalue().decode()
    sentence = "All workers must build the same model. Received: variable sequential_1/dense_1/kernel, of"
    assert f"ConfigError: {sentence}" in said
    assert "an invalid command line or configuration would fail again; ending all tasks" in said
    assert "restart 1/2" not in said
