"""Parameter servers: exact counts, whoever dies; Keras' own results; faults in a sentence; an end for all roles."""

import itertools
import sys
import time

import keras
import numpy as np
import pytest

from tests.helpers import fork_server
from tests.monitoring.test_tensorboard import curves
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tfdist.parameter_server import scheduler

pytestmark = pytest.mark.timeout(600)


def run(module, folder, workers, *cases):
    command = fork_server.command(f"tests.multiprocess.{module}", str(folder / "out"), *cases)
    with Roles(command, folder / "roles", workers) as roles:
        code = roles.wait("chief:0", 300)
        assert code == 0, roles.log("chief:0")
        assert [roles.wait(task, 60) for task in roles.processes] == [0] * len(roles.processes), "every role ends"
        return harness.load(folder / "out", 0), roles.log("chief:0"), folder / "out"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return run("ps_program", tmp_path_factory.mktemp("ps"), workers=2)


@pytest.fixture(scope="module")
def results(program):
    return program[0]


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """Returns a function: case -> its results, of a run of all cases of the same tier."""
    done = {}

    def find(case):
        slow = case in SLOW
        if slow not in done:
            cases = [each for each in FIT_CASES if (each in SLOW) == slow]
            done[slow] = run("ps_fit_program", tmp_path_factory.mktemp("ps_fit"), 1, *cases)[0]
        return done[slow][case]

    return find


def test_digits_reach_their_accuracy_with_the_keys_of_keras(results):
    history = results["train_digits"]["history"]
    assert history["val_accuracy"][-1] >= 0.97
    assert list(history) == ["accuracy", "loss", "val_accuracy", "val_loss"], "as plain Keras sorts them"
    assert results["train_digits"]["epoch"] == list(range(10))


def test_iterations_are_exact_and_in_the_saved_model(program):
    results, _, out = program
    assert results["train_digits"]["iterations"] == [22 * epoch for epoch in range(1, 11)]
    model = keras.models.load_model(out / "digits.keras")
    assert model.optimizer.iterations.numpy() == 220
    assert results["train_digits"]["report"]["retried_steps"] == 0


def test_history_equals_the_sum_of_what_steps_returned(results):
    digits = results["train_digits"]
    assert len(digits["counted"]) == 220
    for epoch, steps in enumerate(np.reshape(digits["counted"], (10, 22, -1))):
        total = np.float32(0)
        for step in steps:
            total += step
        loss, examples, right, seen, iterations = total
        assert examples == seen == 22 * 64 and iterations == 22
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
    assert step == len(end) == 220
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
    assert digits["hooks"] == list(itertools.chain.from_iterable([*one_epoch, ("epoch", epoch)] for epoch in range(10)))
    assert all(set(logs) == {"accuracy", "loss"} for logs in digits["logs"])
    for epoch in range(10):
        assert digits["logs"][22 * epoch + 21]["loss"] == digits["history"]["loss"][epoch], "complete at the last step"
    assert len({logs["loss"] for logs in digits["logs"]}) >= 2 * 10, "they move"


def test_evaluate_and_the_saved_model_agree(program):
    from tfdist.tasks import digits

    results, _, out = program
    model = keras.models.load_model(out / "digits.keras")
    assert np.allclose(model.evaluate(*digits.load()[1], verbose=0), results["train_digits"]["evaluation"], atol=1e-6)


def test_the_chief_writes_what_is_on_the_servers(results):
    found = results["save_files"]
    assert found["served"] < 1e-6 and found["restored"] == 0


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


SIZES = (1, 10, 11, 19, 20, 41)


@pytest.mark.parametrize("kind", ["function", "arrays or dataset"])
@pytest.mark.parametrize("size", SIZES)
def test_evaluate_and_predict_equal_one_process(results, size, kind):
    cases = results["evaluate_and_predict"]
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
    assert "tfdist: worker:1 is lost; the others go on" in log


def test_a_worker_that_is_started_again_rejoins(program):
    results, log, _ = program
    rejoined = results["lose_a_worker_in_training"]
    assert "tfdist: worker:1 is back" in log
    assert rejoined["ran"] == {0, 1}
    assert rejoined["iterations_after"] == [150, 180]


def test_a_worker_that_is_killed_in_evaluation_costs_no_example(results):
    found = results["lose_a_worker_in_evaluation"]
    assert found["hooks"] == list(range(150))
    assert np.allclose(found["evaluation"], found["expected"], rtol=0, atol=1e-6)
    assert np.allclose(found["function"], found["expected"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("python", "The dataset function calls Python (from_generator, py_function or numpy_function)"),
        ("outside", "uses a dataset of the chief's"),
        ("variable", "uses a variable, table or iterator of the chief's"),
        ("no dataset", "A dataset function must return a tf.data.Dataset."),
        ("finite", "The epoch has 60 steps, but the dataset that the dataset function returns has 15 batches"),
        ("uncounted", "has ended, and it is not known before which worker takes how many steps"),
        ("no steps", "fit needs steps_per_epoch where workers make the data"),
        ("table", "A lookup table is the chief's wherever it is created: let a layer of the model look up."),
        ("in a condition", "within tf.cond, tf.while_loop or a tf.function of its own"),
        ("endless", "endless dataset: give the number of steps"),
        ("jit", "jit_compile=True is not possible under parameter_server"),
        ("eagerly", "run_eagerly=True is not possible under parameter_server"),
        ("accumulation", "gradient_accumulation_steps is not possible under parameter_server"),
        ("ema", "ema_overwrite_frequency is not possible under parameter_server"),
        ("muon", "The optimizer Muon is not possible under parameter_server"),
        ("spectral", "The layer spectral, a SpectralNormalization, is not possible under parameter_server"),
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


# The placement first, on servers that no other model has filled.
FIT_CASES = [
    "placement",
    "arrays",
    "validation_split_nadam",
    "validation_data_both",
    "dataset",
    "steps",
    "runs_out",
    "initial_epoch_sample_weight",
    "executions",
    "generator",
    "class_weight",
    "added_losses_momentum",
    "schedule",
    "adamw_clip_ema",
    "stopping",
    "rates",
    "several",
    "texts",
    "rows",
    "own_step",
    "two_optimizers",
    "inside",
    "on_batches",
    "amid",
    "predict_first",
    "own_loss",
    "nan",
    "masks",
    "output_losses",
]
# Each of these goes the way of another one.
SLOW = ("validation_split_nadam", "steps", "class_weight", "schedule", "stopping", "own_step", "on_batches")
PARITY = [
    pytest.param(case, marks=pytest.mark.slow if case in SLOW else ())
    for case in FIT_CASES
    if case not in ("placement", "masks", "output_losses")
]


@pytest.mark.parametrize("case", PARITY)
def test_fit_with_one_worker_equals_plain_keras(parity, case):
    mine, plain = parity(case)
    assert not isinstance(mine, str), mine
    assert mine["epoch"] == plain["epoch"]
    assert list(mine["history"]) == list(plain["history"])
    for name in mine["history"]:
        assert np.allclose(mine["history"][name], plain["history"][name], rtol=0, atol=1e-6, equal_nan=True), name
    assert len(mine["variables"]) == len(plain["variables"])
    for (path, value), expected in zip(mine["variables"].items(), plain["variables"].values(), strict=True):
        if case == "generator" and path.endswith("iteration"):
            assert value == 4  # plain Keras counts one more, at which it finds no data
        else:
            assert np.allclose(value, expected, rtol=0, atol=1e-6), path
    assert mine.get("iterations") == plain.get("iterations")
    if "predictions" in mine:
        assert list(mine["predictions"]) == list(plain["predictions"])
        for name, found in mine["predictions"].items():
            assert np.allclose(found, plain["predictions"][name], rtol=0, atol=1e-6), name


def test_no_case_is_left_out(parity):
    assert set(FIT_CASES) == parity("known")


def test_by_bytes_places_each_variable_on_the_least_loaded_server(parity):
    placed = parity("placement")
    loads, started = [0, 0], None
    for nbytes, server in placed:
        if started is None:  # what was there before is not known here
            started = server
        loads[server] += nbytes
    assert max(size for size, _ in placed) * 2 > sum(loads)
    largest = max(placed)[1]
    after = placed[[size for size, _ in placed].index(max(placed)[0]) + 1]
    assert after[1] != largest, "the one after the largest goes to the other server"


def test_the_losses_of_single_outputs_are_means_over_examples(parity):
    logged, means = parity("output_losses")
    assert logged == pytest.approx(means, rel=1e-5)


def test_each_step_has_masks_of_its_own_and_the_same_again(parity):
    first, second = (np.array(masks) for masks in parity("masks"))
    assert len(first) == 8 and len(np.unique(first, axis=0)) == 8
    assert np.array_equal(first, second)


def test_each_step_draws_numbers_of_its_own_whichever_worker_runs_it(results):
    first, second = results["noise"]
    for run in (first, second):
        assert len(run) >= 40
        for drawn in run.T:
            # Of numbers of 23 bits two are the same now and then; of workers that draw the same, half of them.
            assert len(np.unique(drawn)) > 0.9 * len(drawn)
    assert np.array_equal(np.sort(first[:, 0]), np.sort(second[:, 0])), "keras.random, with one seed"


@pytest.mark.parametrize(
    ("what", "workers", "ps", "sentence"),
    [
        ("servers", 1, 2, "tfdist.errors.ClusterError: ps:1 is lost"),
        ("workers", 2, 1, "tfdist.errors.ClusterError: No worker has worked for"),
        pytest.param(
            "error", 1, 1, "Received a label value of 9 which is outside the valid range", marks=pytest.mark.slow
        ),
        ("interrupt", 1, 1, "KeyboardInterrupt"),
    ],
)
def test_all_roles_end(tmp_path, what, workers, ps, sentence):
    command = fork_server.command("tests.multiprocess.ps_end_program", what)
    with Roles(command, tmp_path / "roles", workers, ps) as roles:
        while "it happens" not in roles.log("chief:0") and roles.processes["chief:0"].poll() is None:
            time.sleep(0.05)
        happened = time.monotonic()
        assert roles.wait("chief:0", 120) not in (0, None)
        assert time.monotonic() - happened < 100  # a server that is given up alone would take the 300 s of a start
        log = roles.log("chief:0")
        assert sum(sentence in line for line in log.splitlines()) == 1, log
        killed = {"servers": {"ps:1"}, "workers": {"worker:0", "worker:1"}}.get(what, set())
        for task in set(roles.processes) - killed - {"chief:0"}:
            assert roles.wait(task, 60) == 1, "or a scheduler would think that it has finished"
            assert "ends with exit code 1, as the chief has\n" in roles.log(task)


@pytest.mark.parametrize(
    ("what", "chiefs", "others", "said"),
    [
        ("chief", -9, 1, "ends with exit code 1, as the chief has gone without a word"),
        pytest.param("exit", 3, 3, "ends with exit code 3, as the chief has\n", marks=pytest.mark.slow),
    ],
)
def test_those_who_serve_end_as_the_chief_does(tmp_path, what, chiefs, others, said):
    command = fork_server.command("tests.multiprocess.ps_end_program", what)
    with Roles(command, tmp_path / "roles", 1, 1) as roles:
        assert roles.wait("chief:0", 90) == chiefs
        for task in ("worker:0", "ps:0"):
            assert roles.wait(task, 60) == others
            assert said in roles.log(task)


def test_all_workers_update_the_moving_statistics(results):
    # Of 100 updates, however few are one worker's: a single one of zeros, or of tens, moves the mean by 0.037 at least.
    assert 5 * 0.99**100 + 0.02 < results["statistics"] < 10 - 5 * 0.99**100 - 0.02


@pytest.mark.slow
def test_the_same_command_serves_or_trains_under_tf_config(tmp_path):
    options = ["--config.epochs=1", "--config.steps_per_epoch=4", f"--workdir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "tfdist.train", "--config=configs/digits_parameter_server.py", *options]
    with Roles(command, tmp_path / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 120) == 0, roles.log("chief:0")
        assert [roles.wait(task, 60) for task in roles.processes] == [0] * 3
        assert "ends with exit code 0, as the chief has" in roles.log("worker:0")
    assert (tmp_path / "run" / "summary.json").exists()
