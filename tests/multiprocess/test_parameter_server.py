"""Parameter servers: exact counts, whoever dies; evaluation and prediction; errors and their messages."""

import itertools

import keras
import numpy as np
import pytest

from tests.helpers import tiers
from tests.monitoring.test_tensorboard import curves
from tests.multiprocess import harness
from tfdist.parameter_server import scheduler

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return harness.run_roles("ps_program", tmp_path_factory.mktemp("ps"), workers=2)


@pytest.fixture(scope="module")
def results(program):
    return program[0]


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    """What the second tier asks for."""
    scenarios = ("further_sizes", "records", "save_files", "lose_a_worker_in_evaluation")
    return harness.run_roles("ps_program", tmp_path_factory.mktemp("ps"), 2, *scenarios)[0]


EPOCHS, STEPS = 3, 22  # of the digits; test_train.py trains them to 97 %


def test_digits_reach_their_accuracy_with_the_keys_of_keras(results):
    history = results["train_digits"]["history"]
    assert history["val_accuracy"][-1] >= 0.8
    assert list(history) == ["accuracy", "loss", "val_accuracy", "val_loss"], "as plain Keras sorts them"
    assert results["train_digits"]["epoch"] == list(range(EPOCHS))


def test_iterations_are_exact_and_in_the_saved_model(program):
    results, _, out = program
    assert results["train_digits"]["iterations"] == [STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    model = keras.models.load_model(out / "digits.keras")
    assert model.optimizer.iterations.numpy() == EPOCHS * STEPS
    assert results["train_digits"]["report"]["retried_steps"] == 0


def test_history_equals_the_sum_of_what_steps_returned(results):
    digits = results["train_digits"]
    assert len(digits["counted"]) == EPOCHS * STEPS
    for epoch, steps in enumerate(np.reshape(digits["counted"], (EPOCHS, STEPS, -1))):
        total = np.float32(0)
        for step in steps:
            total += step
        loss, examples, right, seen, iterations = total
        assert examples == seen == STEPS * 64 and iterations == STEPS
        assert digits["history"]["loss"][epoch] == loss / examples
        assert digits["history"]["accuracy"][epoch] == right / seen


def test_tensorboard_has_how_far_steps_overlap(program):
    results, _, out = program
    train = curves(out / "curves")["train"]
    outer_begin, begin, end, outer_end = np.array(results["train_digits"]["spans"]).T[:, :, None]
    # A step looks at the count of ended ones, and adds itself, at some moment between two of these.
    least = np.count_nonzero((end > begin.T) & (outer_end < end.T), axis=0).mean()
    most = np.count_nonzero((outer_end > outer_begin.T) & (end < outer_end.T), axis=0).mean() - 1  # itself
    ((step, staleness),) = train["ps/staleness"]
    assert step == len(end) == EPOCHS * STEPS
    assert least - 1e-4 <= staleness <= most + 1e-4 and staleness > 0.3, "of two workers"
    ((_, in_flight),) = train["ps/steps_in_flight"]
    assert 2 < in_flight <= 2 * scheduler.MAX_IN_FLIGHT
    # Workers make the data, nobody has the gradient of all, and servers send no gradients to each other.
    assert not train.keys() & {"perf/input_wait_ms", "train/gradient_norm", "comm/bytes_per_step"}
    ((_, waited),) = curves(out / "curves_of_slow_data")["train"]["perf/input_wait_ms"]
    slow_data = results["evaluate_and_predict"]["slow_data"]  # seconds, for 10 steps, each of which waits for 150 ms
    assert 50 < waited < 100 * slow_data, "the chief reads the data; the steps take some of the time"


def test_batch_hooks_come_once_a_step_in_order_with_logs(results):
    digits = results["train_digits"]
    one_epoch = list(itertools.chain.from_iterable((("begin", step), ("end", step)) for step in range(22)))
    assert digits["hooks"] == list(
        itertools.chain.from_iterable([*one_epoch, ("epoch", epoch)] for epoch in range(EPOCHS))
    )
    assert all(set(logs) == {"accuracy", "loss"} for logs in digits["logs"])
    for epoch in range(EPOCHS):
        assert digits["logs"][STEPS * epoch + STEPS - 1]["loss"] == digits["history"]["loss"][epoch], (
            "complete at the last step"
        )
    assert len({logs["loss"] for logs in digits["logs"]}) >= 2 * EPOCHS, "they move"


def test_evaluate_and_the_saved_model_agree(program):
    from tfdist.tasks import digits

    results, _, out = program
    model = keras.models.load_model(out / "digits.keras")
    assert np.allclose(model.evaluate(*digits.load()[1], verbose=0), results["train_digits"]["evaluation"], atol=1e-6)


@pytest.mark.full
def test_the_chief_writes_what_is_on_the_servers(further):
    found = further["save_files"]
    assert found["served"] < 1e-6 and found["restored"] == 0


@pytest.mark.full
def test_the_chief_reads_records(further):
    found = further["records"]
    assert found["steps"] == 10
    of_records, of_arrays = found["evaluated"]
    np.testing.assert_allclose(of_records, of_arrays, rtol=1e-5)
    assert found["validated"] == pytest.approx(of_records[0], rel=1e-5)
    assert found["differs"] < 1e-6


def test_weights_are_on_the_servers_and_counters_on_the_chief(results):
    devices = results["train_digits"]["devices"]
    on_chief = {path for path, device in devices.items() if "/job:chief" in device}
    assert on_chief == {
        "adam/iteration",
        "adam/learning_rate",
        "loss/total",
        "loss/count",
        "accuracy/total",
        "accuracy/count",
        *(path for path in devices if "seed_generator" in path),
    }
    assert {device for path, device in devices.items() if path not in on_chief} == {
        f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)
    }
    for path, device in devices.items():
        if path.endswith("_momentum"):
            layer, kind = path.removeprefix("adam/").removesuffix("_momentum").rsplit("_", 1)
            assert device == devices[f"{layer.replace('digits_', 'digits/')}/{kind}"], "slots are with their variable"


def test_bytes_per_server_are_those_of_the_variables(program):
    results, _, out = program
    model = keras.models.load_model(out / "digits.keras")
    kept = [
        v
        for v in (*model.weights, *model.optimizer.variables)
        if v.path not in ("adam/iteration", "adam/learning_rate")
    ]
    expected = sum(v.numpy().nbytes for v in kept if "seed" not in v.path)
    assert sum(results["train_digits"]["report"]["bytes_per_server"].values()) == expected


# In batches of 10: less than one, a whole and a short one, several.
QUICK_SIZES = (1, 11, 41)


@pytest.mark.parametrize("kind", ["function", "arrays or dataset"])
@pytest.mark.parametrize("size", tiers.cases([1, 10, 11, 19, 20, 41], quick=QUICK_SIZES))
def test_evaluate_and_predict_equal_one_process(request, size, kind):
    if size in QUICK_SIZES:
        cases = request.getfixturevalue("results")["evaluate_and_predict"]
    else:
        cases = request.getfixturevalue("further")["further_sizes"]
    (found,) = (result for key, result in cases.items() if key[0] == size and key[1] in kind)
    assert np.allclose(found["evaluation"], found["expected"], rtol=0, atol=1e-6)
    assert found["predictions"].shape == found["expected_predictions"].shape == (size, 3)
    assert np.allclose(found["predictions"], found["expected_predictions"], rtol=0, atol=1e-6)
    assert found["hooks"] == list(range(-(-size // 10)))


def test_a_worker_that_is_killed_in_training_costs_no_step(program):
    results, log, _ = program
    lost = results["lose_a_worker_in_training"]
    assert lost["iterations"] == [30, 60, 90, 120]
    assert [hook for hook in lost["hooks"] if hook[0] == "end"] == [("end", step) for step in range(30)] * 4
    assert 0 < lost["retried"] <= 4, "what it had when it died, and no more"
    assert "tfdist: worker:1 is lost; the others continue" in log


def test_a_worker_that_is_started_again_rejoins(program):
    results, log, _ = program
    rejoined = results["lose_a_worker_in_training"]
    assert "tfdist: worker:1 is back" in log
    assert rejoined["ran"] == {0, 1}
    assert rejoined["iterations_after"] == [150, 180]


@pytest.mark.full
def test_a_worker_that_is_killed_in_evaluation_costs_no_example(further):
    found = further["lose_a_worker_in_evaluation"]
    assert found["hooks"] == list(range(150))
    assert np.allclose(found["evaluation"], found["expected"], rtol=0, atol=1e-6)
    assert np.allclose(found["function"], found["expected"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("python", "The dataset function calls Python (from_generator, py_function or numpy_function)"),
        ("outside", "uses a dataset that exists only on the chief"),
        ("variable", "uses a variable, table or iterator that exists only on the chief"),
        ("no dataset", "A dataset function must return a tf.data.Dataset."),
        ("finite", "The epoch has 60 steps, but the dataset that the dataset function returns has 15 batches"),
        ("uncounted", "has ended, and the number of steps that each worker takes is not known in advance"),
        ("no steps", "fit needs steps_per_epoch where workers make the data"),
        ("table", "A lookup table is the chief's wherever it is created: let a layer of the model look up."),
        ("in a condition", "within tf.cond, tf.while_loop or a nested tf.function"),
        ("endless", "endless dataset: give the number of steps"),
        ("jit", "jit_compile=True is not possible with parameter_server"),
        ("eagerly", "run_eagerly=True is not possible with parameter_server"),
        ("accumulation", "gradient_accumulation_steps is not possible with parameter_server"),
        ("ema", "ema_overwrite_frequency is not possible with parameter_server"),
        ("muon", "the optimizer Muon is not possible with parameter_server"),
        ("spectral", "SpectralNormalization (the layer spectral) is not possible with parameter_server"),
        ("unbuilt", "has no variables yet, and they are to be on the servers"),
        ("layer outside", "A layer was created outside of this trainer's scope (it has dense_"),
        ("variable outside", "uses 'outside:0', which is not on a parameter server"),
    ],
)
def test_a_fault_is_a_sentence(results, case, sentence):
    found, _ = results["faults"]
    kind, message = found[case]
    assert kind == "ConfigError", message
    assert sentence in message


@pytest.mark.parametrize(("case", "words"), [("shape", "Matrix size-incompatible"), ("labels", "label value of 4")])
def test_an_error_of_the_step_has_its_own_message(results, case, words):
    kind, message = results["faults"][0][case]
    assert kind == "InvalidArgumentError" and words in message


def test_a_map_may_hold_an_if(results):
    assert results["faults"][0]["autograph"] is None


def test_after_errors_it_still_trains(results):
    assert results["faults"][1][0] >= 15


def test_each_step_draws_numbers_of_its_own_whichever_worker_runs_it(results):
    first, second = results["noise"]
    for run in (first, second):
        assert len(run) >= 40
        for drawn in run.T:
            # Of numbers of 23 bits two are the same now and then; of workers that draw the same, half of them.
            assert len(np.unique(drawn)) > 0.9 * len(drawn)
    assert np.array_equal(np.sort(first[:, 0]), np.sort(second[:, 0])), "keras.random, with one seed"


def test_all_workers_update_the_moving_statistics(results):
    # Of 100 updates, however few are one worker's: a single one of zeros, or of tens, moves the mean by 0.037 at least.
    assert 5 * 0.99**100 + 0.02 < results["statistics"] < 10 - 5 * 0.99**100 - 0.02
