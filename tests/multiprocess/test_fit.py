"""Whatever `fit` takes, two replicas under the Trainer train what plain Keras trains on one device."""

import re

import numpy as np
import pytest

from tests.helpers import tiers
from tests.multiprocess import harness
from tests.multiprocess.test_strategies import difference

# Every run of the program takes up to two minutes on two cores.
pytestmark = pytest.mark.timeout(900)

BARE = ("dict_dataset", "tuple_arrays", "text_vectorization", "five_dimensions", "own_steps")
PYTHON_DATA = ("generator", "finite_generator", "validation_generator", "py_dataset")
INPUTS = [
    "dict_arrays",
    "dict_dataset",
    "tuple_arrays",
    "text_vectorization",
    "string_lookup",
    "ragged",
    "five_dimensions",
    "odd_first_batch",
    "short_last_batch",
    "short_last_batch_of_masked_words",
    "endless_batches_of_two_sizes",
    "functions_of_unequal_length",
]
LOSSES = [
    "sample_weight_and_validation_split",
    "class_weight",
    "class_weight_dataset",
    "class_weight_function",
    "own_steps",
    "added_losses",
    "summed_loss",
    "unreduced_loss",
    "loss_of_one_number",
    "own_loss",
    "two_optimizers",
    "metrics_with_state",
    "masked_steps",
    "endless_masked_batches_of_two_sizes",
]
EXECUTIONS = [
    "executions_of_4",
    "executions_of_16",
    "executions_cut_by_the_epoch",
    "executions_cut_by_epochs_of_finite_data",
    "executions_of_unknown_data",
    "compiled",
    "compiled_executions",
    "eager",
    "eager_executions",
]
CLIPPING = ["clipnorm", "global_clipnorm", "clipvalue"]
OPTIMIZERS = [
    *CLIPPING,
    "schedule_and_moving_average",
    "moving_average_overwrites",
    "accumulation",
    "accumulation_with_everything",
    "accumulation_of_embeddings",
    "rows_of_words",
    "loss_scale",
    "loss_scale_and_accumulation",
]
HALVES = ["mixed_bfloat16", "mixed_float16", "inf_on_one_replica"]
EXACT = [*INPUTS, *LOSSES, *EXECUTIONS, *OPTIMIZERS]
ALL = [*EXACT, *HALVES, *PYTHON_DATA]
TRAINED = [*ALL, *(f"bare {case}" for case in BARE)]
# Each of these goes the way of another one, or of two together: the nearer ones are in `make test-all`, the others in the
# slow tier.
FULL = [
    "dict_arrays",
    "text_vectorization",
    "five_dimensions",
    "short_last_batch_of_masked_words",
    "class_weight_function",
    "loss_of_one_number",
    "added_losses",
    "summed_loss",
    "two_optimizers",
    "endless_masked_batches_of_two_sizes",
    "executions_cut_by_the_epoch",
    "executions_of_unknown_data",
    "compiled",
    "eager",  # trained so in test_strategies.py and tests/step/test_loss_divisors.py
    "global_clipnorm",  # as rows_of_words has it
    "moving_average_overwrites",
    "accumulation_of_embeddings",
    "mixed_float16",
    "bare own_steps",  # as tests/cases has it
    "bare text_vectorization",
    "bare five_dimensions",
    "string_lookup",
    "ragged",
    "odd_first_batch",
    "functions_of_unequal_length",
    "generator",  # python_data in tests/cases
    "finite_generator",
    "py_dataset",
]
SLOW = [
    "tuple_arrays",
    "class_weight",
    "class_weight_dataset",
    "unreduced_loss",
    "own_loss",
    "executions_of_16",
    "executions_cut_by_epochs_of_finite_data",
    "compiled_executions",
    "eager_executions",
    "clipnorm",
    "clipvalue",
    "schedule_and_moving_average",
    "accumulation",
    "loss_scale",
    "mixed_bfloat16",
]
# Workers run the code that the replicas of one process do, but for how data, gradients, statistics and logs come and go
# between processes. The cases of just that run with workers, the others with the replicas of one process; in the slow tier
# it is the other way round.
BETWEEN_WORKERS = [
    # unequal shares of a batch, or none for your own pipeline to make
    "dict_dataset",
    "string_lookup",
    "ragged",
    "odd_first_batch",
    "short_last_batch",
    "endless_batches_of_two_sizes",
    "functions_of_unequal_length",
    "class_weight_function",
    *PYTHON_DATA,
    # what replicas weigh and reduce
    "own_steps",
    "summed_loss",
    "loss_of_one_number",
    "two_optimizers",
    "metrics_with_state",
    "masked_steps",
    "endless_masked_batches_of_two_sizes",
    # how many steps there are in an execution
    "executions_of_4",
    "executions_cut_by_the_epoch",
    "executions_of_unknown_data",
    "compiled_executions",
    "eager",
    # when gradients are reduced
    "global_clipnorm",
    "accumulation_with_everything",
    "accumulation_of_embeddings",
    "rows_of_words",
    "inf_on_one_replica",
]
# Trained by two workers of two replicas each, too.
QUICK_OF_FOUR = ("short_last_batch", "rows_of_words")
OF_FOUR = (
    *QUICK_OF_FOUR,
    "masked_steps",
    "dict_dataset",
    "string_lookup",
    "ragged",
    "odd_first_batch",
    "sample_weight_and_validation_split",
    "own_steps",
    "summed_loss",
    "loss_of_one_number",
    "metrics_with_state",
    "executions_of_4",
    "eager",
    "accumulation_with_everything",
)


def marks(strategy, case):
    """The mark of the tier in which a case, maybe with a bare fit, runs with a strategy."""
    name = case.removeprefix("bare ")
    elsewhere = (name in BETWEEN_WORKERS) != (strategy == "multi_worker_mirrored")
    if strategy == "stock" or name in PYTHON_DATA:
        elsewhere = False
    if name in SLOW or elsewhere:
        return pytest.mark.slow
    return pytest.mark.full if name in FULL or case in FULL else ()


@pytest.fixture(scope="module")
def ranks(runs, stock):
    """Returns a function: strategy, case -> each rank's results, of a run of all cases of the same tier."""

    def find(strategy, case):
        every = ALL if strategy == "stock" else TRAINED
        alike = [each for each in every if marks(strategy, each) == marks(strategy, case)]
        return [stock(*alike)] if strategy == "stock" else runs(strategy, "fit_program", *alike)[0]

    return find


@pytest.fixture(scope="module")
def plain(ranks):
    """Returns a function: case -> the results of plain Keras."""
    return lambda case: ranks("stock", case)[0][case]


def with_two_replicas(cases, bare=""):
    """A test's parameters `strategy` and `case`."""
    parameters = [
        pytest.param(strategy, case, marks=marks(strategy, bare + case))
        for strategy in ("mirrored", "multi_worker_mirrored")
        for case in cases
    ]
    return pytest.mark.parametrize(("strategy", "case"), parameters)


def test_no_case_is_left_out():
    program = (harness.ROOT / "tests/multiprocess/fit_program.py").read_text()
    assert set(re.findall(r"^@case\ndef (\w+)", program, re.MULTILINE)) == set(ALL)
    assert set(TRAINED) > {*BETWEEN_WORKERS, *FULL, *SLOW, *BARE}
    assert not {*FULL} & {*SLOW}


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_plain_keras_trains_what_the_arithmetic_says(runs, ranks, case):
    (expected,) = runs("arithmetic", "fit_program", *ALL)[0]
    results, expected, far = ranks("stock", case)[0][case], expected[case], 2e-2 if case in HALVES else 1e-5
    np.testing.assert_equal(set(results["history"]), set(expected["history"]))
    for name, values in expected["history"].items():
        np.testing.assert_allclose(results["history"][name], values, atol=far)
    for mine, other in zip(results["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, other, atol=far, rtol=0)


@with_two_replicas(EXACT)
def test_two_replicas_train_what_one_process_does(plain, ranks, strategy, case):
    for results in ranks(strategy, case):
        assert difference(results[case]["history"], plain(case)["history"]) < 1e-5
        assert difference(results[case]["weights"], plain(case)["weights"]) < 1e-5
        assert difference(results[case]["slots"], plain(case)["slots"]) < 1e-4


@pytest.mark.parametrize("case", tiers.cases(OF_FOUR, QUICK_OF_FOUR))
def test_so_do_two_workers_of_two_replicas_each(stock, runs, case):
    alike = [each for each in OF_FOUR if (each in QUICK_OF_FOUR) == (case in QUICK_OF_FOUR)]
    expected = stock(*alike)[case]
    for results in runs("multi_worker_mirrored:2", "fit_program", *alike)[0]:
        assert difference(results[case]["history"], expected["history"]) < 1e-5
        assert difference(results[case]["weights"], expected["weights"]) < 1e-5
        assert difference(results[case]["slots"], expected["slots"]) < 1e-4


@with_two_replicas(BARE, "bare ")
def test_so_does_a_bare_fit(plain, ranks, strategy, case):
    for results in ranks(strategy, f"bare {case}"):
        for name, values in plain(case)["history"].items():
            if np.ndim(values) == 1:  # of a vector of numbers Keras logs the mean, with several workers
                assert difference(results[f"bare {case}"]["history"][name], values) < 1e-5
        assert difference(results[f"bare {case}"]["weights"], plain(case)["weights"]) < 1e-5


@with_two_replicas(PYTHON_DATA)
def test_data_from_python_feed_all_replicas(plain, ranks, strategy, case):
    for results in ranks(strategy, case):
        assert difference(results[case], plain(case)) < 1e-5


@with_two_replicas(HALVES)
def test_16_bits_stay_near(plain, ranks, strategy, case):
    for results in ranks(strategy, case):
        for name, expected in plain(case)["history"].items():
            np.testing.assert_allclose(results[case]["history"][name], expected, rtol=2e-2)
        for mine, expected in zip(results[case]["weights"], plain(case)["weights"], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=2e-2, atol=2e-3)


@with_two_replicas(["inf_on_one_replica"])
def test_inf_on_one_replica_skips_the_step_on_all(plain, ranks, strategy, case):
    for results in (plain(case), *(results[case] for results in ranks(strategy, case))):
        expected = {"dynamic_scale": 2**15 / 4, "step_counter": 1, "iterations": 2}
        assert results["scale"] == expected
        assert all(np.isfinite(weights).all() for weights in results["weights"])


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks("stock", case)) for case in CLIPPING])
def test_clipping_does_clip(plain, case):
    losses = plain(case)["history"]["loss"]
    assert plain("short_last_batch")["history"]["loss"][-1] < losses[-1] - 0.05
