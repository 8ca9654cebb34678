"""An optimizer whose state is split over the workers updates to the same bits as one with all state on each replica."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiers

QUICK = ("adam", "adamw")
OTHERS = (
    "sgd",
    "lion",
    "nadam",
    "adamax",
    "amsgrad",
    "rmsprop",
    "adagrad",
    "adadelta",
    "ftrl",
    "schedule",
    "without_decay_of_biases",
)
OPTIONS = (
    *("clipnorm", "global_clipnorm", "clipvalue", "accumulation", "clipped_accumulation", "loss_scale_factor"),
    *("loss_scale", "frozen", "executions", "unfinite", "compressed", "averages", "overwriting_averages"),
)
ERRORS = {
    "old_format": "Keras' old format cannot hold state that is in parts on the workers: save to .keras or .weights.h5",
    "checkpoint_of_the_chief": "ModelCheckpoint writes a model whose state is in parts on the workers",
    "lamb": "Lamb, which is not known to update each element independently",
    "own_update": "OwnUpdate, which is not known to update each element independently",
    "swapped_averages": "the callback SwapEMAWeights is not possible with strategy.shard_optimizer",
}
WORKERS, DEVICES = "multi_worker_mirrored", "mirrored:2"
TRAININGS = [
    *((WORKERS, 2, "", case) for case in QUICK),
    *((DEVICES, 1, "", case) for case in QUICK),
    *((WORKERS, 2, "", case) for case in (*OTHERS, *OPTIONS)),
    *((WORKERS, 3, "", case) for case in (*QUICK, *OPTIONS)),
    *((WORKERS, 2, "grpc", case) for case in (*QUICK, *OPTIONS[-2:])),
    *((f"{WORKERS}:2", 2, "", case) for case in QUICK),
    *((DEVICES, 1, "", case) for case in (*OTHERS, *OPTIONS)),
    *(("mirrored:4", 1, "", case) for case in QUICK),
]


def run(runs, case, strategy=WORKERS, workers=2, transport=""):
    """Returns what a program has come to that runs a case and those beside it."""
    quick = (*QUICK, *ERRORS) if strategy == WORKERS else QUICK
    cases = next(group for group in (quick, OTHERS, OPTIONS) if case in group)
    return runs(strategy, "sharded_program", *cases, size=workers, transport=transport)


@pytest.mark.parametrize(("strategy", "workers", "transport", "case"), tiers.cases(TRAININGS, 2 * len(QUICK)))
def test_split_state_gives_the_same_bits(runs, strategy, workers, transport, case):
    for rank in run(runs, case, strategy, workers, transport)[0]:
        whole, sharded = rank[case]["whole"], rank[case]["sharded"]
        assert sharded[0] == whole[0]
        assert sharded[1] == whole[1]
        assert whole[1][-1] < whole[1][0]
        assert sharded[2] < whole[2]


def test_each_worker_holds_its_part_and_says_so(runs):
    ranks, out = run(runs, QUICK[0])
    log = next((out / "logs").glob("*worker-0*")).read_text()
    lines = re.findall(r"optimizer state: ([\d.]+) MB on each of 2 workers instead of ([\d.]+)", log)
    assert len(lines) >= len(QUICK)
    for (own, every), case in zip(lines, QUICK, strict=False):
        scalars = 2 * 8  # the number of updates, and the learning rate
        whole = (ranks[0][case]["whole"][2] - scalars) / 1e6
        assert float(every) == pytest.approx(whole, rel=0.02)
        assert float(own) < 0.58 * whole  # variables as small as these are cut unequally


def test_the_devices_of_a_process_hold_the_slots_once(runs):
    (found,), _ = run(runs, "adam", DEVICES, 1)
    scalars = 2 * 8  # the number of updates, and the learning rate as float32 or float64
    whole, sharded = found["adam"]["whole"][2], found["adam"]["sharded"][2]
    assert 0 <= sharded - whole / 2 <= scalars


def rounded_descent(keeps_master):
    """Returns the weights after each step of gradient descent in NumPy, rounded to bfloat16, and the last ones before rounding."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((67, 8)).astype(np.float32)
    y = rng.integers(0, 5, (67, 1)).astype(np.float32)
    master = weights = np.ones((8, 1), np.float32)
    momentum = np.zeros_like(master)
    steps = []
    for _ in range(3):
        for first in range(0, 67, 12):
            rows = x[first : first + 12]
            gradient = 2 / len(rows) * rows.T @ (rows @ weights - y[first : first + 12])
            momentum = 0.5 * momentum - np.float32(2**-11) * gradient
            master = (master if keeps_master else weights) + momentum
            weights = master.astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)
            steps.append(weights)
    return steps, master


@pytest.mark.full
def test_weights_travel_as_bfloat16_and_are_updated_in_float32(runs):
    steps, master = rounded_descent(keeps_master=True)
    assert (rounded_descent(keeps_master=False)[0][-1] != steps[-1]).sum() > 4
    for strategy, workers in ((WORKERS, 2), ("mirrored:2", 1)):
        ranks, _ = runs(strategy, "sharded_program", "rounded", size=workers)
        for rank in ranks:
            np.testing.assert_array_equal(rank["rounded"][0], steps)
        pieces = [piece for _, piece in sorted(rank["rounded"][1] for rank in ranks)]
        np.testing.assert_allclose(np.concatenate(pieces), master[:, 0], rtol=1e-5)


@pytest.mark.parametrize("case", ERRORS)
def test_what_split_state_cannot_do_is_an_error(runs, case):
    ranks, _ = run(runs, case)
    for rank in ranks:
        assert rank[case].startswith("after 0 epochs: ")
        assert ERRORS[case] in rank[case]


def test_all_workers_write_files_of_split_state_together_which_plain_keras_loads(runs):
    ranks, _ = runs(WORKERS, "sharded_program", "written", size=2)
    found = ranks[0]["written"]
    last = found.pop("trainer.keras")
    assert len(last) == 14  # four weights, two slots of each, the number of updates and the learning rate
    # Twelve steps, of which the first file has six.
    updates = [found.pop(file) for file in ("each-1.keras", "step.weights.h5")]
    assert [int(values[4]) for values in (*updates, last)] == [6, 12, 12]
    assert set(found) == {
        *("best.keras", "each-2.keras", "saved.keras", "function.keras"),
        *("last.weights.h5", "saved.weights.h5", "parts.weights.json"),
    }
    for file, values in found.items():
        for value, right in zip(values, last, strict=True):
            np.testing.assert_array_equal(value, right, err_msg=file)


def test_a_callback_of_the_chief_alone_cannot_save_split_state(runs):
    ranks, _ = runs(WORKERS, "sharded_program", "saved_by_the_chief", size=2)
    errors = ranks[0]["saved_by_the_chief"][0]
    assert set(errors) == {"alone.weights.h5", "alone.keras"}
    for message in errors.values():
        assert "call trainer.save, model.save or model.save_weights on all workers" in message
    assert [rank["saved_by_the_chief"][1] for rank in ranks] == [[0, 1]] * 2  # the training goes on
