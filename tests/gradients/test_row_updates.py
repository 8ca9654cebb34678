"""Large tables are updated by the rows of their gradients: compared with NumPy loops over whole tables, and over touched rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.helpers.options import set_options
from tfdist import ConfigError
from tfdist.gradients import row_updates
from tfdist.gradients.sharded_update import ELEMENTWISE

ROWS = row_updates.MIN_ROWS
COLUMNS = 2
RATE = 0.1
BATCH = 4
TOLERANCE = 5e-6
rng = np.random.default_rng(0)
START = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
LAST = ROWS - 2
# Three steps: an id occurs several times in an example and in a batch, and rows rest for a step.
IDS = np.array(
    [
        [[1, 1, 5], [5, 1, 7], [LAST, 9, 9], [7, 7, 7]],
        [[2, 2, 5], [2, 3, 3], [LAST, 3, 2], [3, 3, 3]],
        [[1, 7, 5], [9, 9, 2], [LAST, 1, 3], [3, 7, 7]],
    ],
    np.int32,
)
TARGETS = rng.standard_normal((*IDS.shape[:2], 1)).astype(np.float32)


# One step of each formula on rows of a table. `slots` holds as many arrays as the formula needs.
def sgd(table, slots, grad, step):
    return table - RATE * grad, slots


def momentum(table, slots, grad, step):
    velocity = 0.9 * slots[0] - RATE * grad
    return table + velocity, [velocity]


def adagrad(table, slots, grad, step):
    total = slots[0] + grad**2
    return table - RATE * grad / np.sqrt(total + 1e-7), [total]


def rmsprop(table, slots, grad, step):
    squares = 0.9 * slots[0] + 0.1 * grad**2
    return table - RATE * grad / np.sqrt(squares + 1e-7), [squares]


def adam(table, slots, grad, step):
    first = 0.9 * slots[0] + 0.1 * grad
    second = 0.999 * slots[1] + 0.001 * grad**2
    rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return table - rate * first / (np.sqrt(second) + 1e-7), [first, second]


# The formula, the first values of its slots, and Keras' optimizer.
OPTIMIZERS = {
    "sgd": (sgd, [], lambda **options: keras.optimizers.SGD(RATE, **options)),
    "adagrad": (adagrad, [0.1], lambda **options: keras.optimizers.Adagrad(RATE, **options)),
    "momentum": (momentum, [0.0], lambda **options: keras.optimizers.SGD(RATE, momentum=0.9, **options)),
    "rmsprop": (rmsprop, [0.0], lambda **options: keras.optimizers.RMSprop(RATE, **options)),
    "adam": (adam, [0.0, 0.0], lambda **options: keras.optimizers.Adam(RATE, **options)),
}


def arithmetic(name, lazy, rows=ROWS, most=np.inf, epochs=1, skip=()):
    """Returns the table after the steps; if `lazy`, a step computes only rows with a gradient. `most` clips the gradient's values."""
    formula, first, _ = OPTIMIZERS[name]
    table = START[:rows].astype(np.float64)
    slots = [np.full(table.shape, value) for value in first]
    for step, (ids, targets) in enumerate(zip(IDS, TARGETS, strict=True), 1):
        if step in skip:
            continue
        ids = np.minimum(ids, rows - 1)
        errors = table[ids].sum((1, 2)) - targets[:, 0]
        grad = np.zeros_like(table)
        for example, error in zip(ids, errors, strict=True):
            np.add.at(grad, example, 2 * error / BATCH)
        grad = np.clip(grad, -most, most)
        chosen = np.unique(ids) if lazy else slice(None)
        table[chosen], new = formula(table[chosen], [slot[chosen] for slot in slots], grad[chosen], step)
        for slot, value in zip(slots, new, strict=True):
            slot[chosen] = value
    return table


def build(optimizer, rows=ROWS, **options):
    inputs = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(rows, COLUMNS)
    model = keras.Model(inputs, keras.ops.sum(table(inputs), (1, 2))[:, None])
    table.embeddings.assign(START[:rows])
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, targets=TARGETS):
    ids = np.minimum(IDS, model.get_weights()[0].shape[0] - 1)
    model.fit(ids.reshape(-1, 3), targets.reshape(-1, 1), batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()[0]


@pytest.fixture
def trainer(mirrored):
    """Returns a function: the strategy's name and `row_updates` -> a Trainer."""

    def make(strategy, mode="auto"):
        if strategy != "mirrored":
            options = {"devices": 2} if strategy == "central_storage" else {}
            return tfdist.Trainer(strategy, row_updates=mode, **options)
        set_options(mirrored, row_updates=mode)
        return tfdist.Trainer(mirrored)

    yield make
    set_options(mirrored, row_updates="auto")


@pytest.fixture
def gradients(monkeypatch):
    """Whether each gradient with which Keras' formula of Adagrad is called is one of a whole table, with rows."""
    seen = []
    formula = keras.optimizers.Adagrad.update_step

    def update_step(optimizer, gradient, variable, learning_rate):
        seen.append(isinstance(gradient, tf.IndexedSlices))
        formula(optimizer, gradient, variable, learning_rate)

    monkeypatch.setattr(keras.optimizers.Adagrad, "update_step", update_step)
    return seen


STRATEGIES = ["one_device", "mirrored", "central_storage"]
TRAININGS = [
    (strategy, mode, name) for strategy in STRATEGIES for mode in ("auto", "lazy", "off") for name in OPTIMIZERS
]
QUICK = [
    ("one_device", "auto", "adagrad"),
    ("one_device", "auto", "adam"),
    ("one_device", "lazy", "adam"),
    ("one_device", "lazy", "rmsprop"),
    ("one_device", "lazy", "momentum"),
    ("one_device", "off", "adagrad"),
    ("mirrored", "auto", "sgd"),
    ("mirrored", "lazy", "adam"),
]


@pytest.mark.parametrize(("strategy", "mode", "name"), tiers.cases(TRAININGS, QUICK))
def test_a_table_trains_as_a_numpy_loop_does(trainer, strategy, mode, name):
    trained = trainer(strategy, mode)
    with trained.scope():
        model = build(OPTIMIZERS[name][2]())
    np.testing.assert_allclose(fit(model), arithmetic(name, lazy=mode == "lazy"), atol=TOLERANCE)


@pytest.mark.parametrize(("mode", "name"), [("auto", "sgd"), ("auto", "adagrad")])
def test_exact_optimizers_equal_the_update_of_the_whole_table(trainer, mode, name):
    tables = []
    for each in (mode, "off"):
        trained = trainer("one_device", each)
        with trained.scope():
            model = build(OPTIMIZERS[name][2]())
        tables.append(fit(model))
    assert np.abs(tables[0] - tables[1]).max() <= 1e-7


@pytest.mark.parametrize(("mode", "whole"), [("auto", False), ("off", True)])
def test_only_rows_are_computed(trainer, gradients, mode, whole):
    trained = trainer("one_device", mode)
    with trained.scope():
        model = build(OPTIMIZERS["adagrad"][2]())
    fit(model)
    assert set(gradients) == {whole}


def test_a_smaller_variable_is_updated_as_a_whole(trainer):
    trained = trainer("one_device", "lazy")
    with trained.scope():
        model = build(OPTIMIZERS["adam"][2](), rows=ROWS - 1)
    np.testing.assert_allclose(fit(model), arithmetic("adam", lazy=False, rows=ROWS - 1), atol=TOLERANCE)


OPTIONS = {
    "jit_compile": ({}, {"jit_compile": True}),
    "executions": ({}, {"steps_per_execution": 3}),
    "loss_scale_factor": ({"loss_scale_factor": 4.0}, {}),
    "clipvalue": ({"clipvalue": 0.5}, {}),
}


@pytest.mark.parametrize("strategy", tiers.cases(STRATEGIES[:2], quick=1))
@pytest.mark.parametrize("option", OPTIONS)
def test_options_work_as_for_whole_tables(trainer, strategy, option):
    trained = trainer(strategy, "lazy")
    of_optimizer, of_model = OPTIONS[option]
    with trained.scope():
        model = build(OPTIMIZERS["adam"][2](**of_optimizer), **of_model)
    most = of_optimizer.get("clipvalue", np.inf)
    np.testing.assert_allclose(fit(model), arithmetic("adam", lazy=True, most=most), atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_a_loss_scale_optimizer_updates_rows(trainer, strategy):
    trained = trainer(strategy, "lazy")
    with trained.scope():
        model = build(keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"][2](), initial_scale=8.0))
    np.testing.assert_allclose(fit(model), arithmetic("adam", lazy=True), atol=TOLERANCE)


def test_a_skipped_step_changes_no_row(mirrored):
    targets = TARGETS.copy()
    targets[1, 0] = np.nan
    trained = tfdist.Trainer(mirrored, nan_policy="skip")
    with trained.scope():
        model = build(OPTIMIZERS["adagrad"][2]())
    np.testing.assert_allclose(fit(model, targets), arithmetic("adagrad", lazy=False, skip=[2]), atol=TOLERANCE)


def test_accumulated_gradients_update_the_whole_table(trainer):
    trained = trainer("one_device", "lazy")
    with trained.scope():
        model = build(OPTIMIZERS["adam"][2](gradient_accumulation_steps=3))
    table = fit(model)
    grad = np.zeros_like(START, np.float64)
    for ids, targets in zip(IDS, TARGETS, strict=True):
        errors = START[ids].sum((1, 2)) - targets[:, 0]
        for example, error in zip(ids, errors, strict=True):
            np.add.at(grad, example, 2 * error / BATCH / 3)
    expected, _ = adam(START.astype(np.float64), [0.0, 0.0], grad, 1)
    np.testing.assert_allclose(table, expected, atol=TOLERANCE)


def test_a_loaded_model_continues_with_its_slots(trainer, tmp_path):
    trained = trainer("one_device", "lazy")
    with trained.scope():
        model = build(OPTIMIZERS["adam"][2]())
    ids, targets = IDS.reshape(-1, 3), TARGETS.reshape(-1, 1)
    model.fit(ids[:BATCH], targets[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    trained.save(model, tmp_path / "model.keras")
    with trained.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(ids[BATCH:], targets[BATCH:], batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(loaded.get_weights()[0], arithmetic("adam", lazy=True), atol=TOLERANCE)


ERRORS = {
    "lamb": (
        lambda: keras.optimizers.Lamb(RATE),
        "Lamb, which is not known to update each element independently; use one of SGD",
    ),
    "adamw": (
        lambda: keras.optimizers.AdamW(RATE),
        r"weight_decay of the optimizer AdamW, .*exclude_from_weight_decay",
    ),
    "averages": (lambda: keras.optimizers.Adam(RATE, use_ema=True), "use_ema=True of the optimizer Adam"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_lazy_updates_that_are_not_possible_are_an_error(trainer, name):
    trained = trainer("one_device", "lazy")
    make, message = ERRORS[name]
    with trained.scope():
        model = build(make())
    with pytest.raises(
        ConfigError, match=f"row_updates='lazy' of .* with {ROWS} rows is not possible with .*{message}"
    ):
        fit(model)


def test_a_table_without_weight_decay_is_updated_by_rows(trainer):
    trained = trainer("one_device", "lazy")
    with trained.scope():
        optimizer = keras.optimizers.AdamW(RATE)
        optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        model = build(optimizer)
    np.testing.assert_allclose(fit(model), arithmetic("adam", lazy=True), atol=TOLERANCE)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_lookup_reads_rows_as_keras_does(trainer, policy):
    trained = trainer("one_device")
    ids = np.array([[0, -1, LAST]], np.int32)
    with trained.scope():
        inputs = keras.Input((3,), dtype="int32")
        model = keras.Sequential([inputs, keras.layers.Embedding(ROWS, COLUMNS, dtype=policy)])
        model.compile("sgd", "mse")
        model.layers[0].embeddings.assign(START)
    expected = keras.ops.convert_to_numpy(model(ids)).astype(np.float32)
    found = model.predict(ids, verbose=0)
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_a_step_does_not_read_a_large_table(trainer, rows):
    trained = trainer("one_device")
    with trained.scope():
        model = build(OPTIMIZERS["adagrad"][2](), rows=rows)
    fit(model)
    table = model.layers[1]

    @tf.function
    def look_up(ids):
        return table(ids)

    kinds = {op.type for op in look_up.get_concrete_function(IDS[0]).graph.get_operations()}
    assert ("ReadVariableOp" in kinds) is (rows < ROWS)


def test_empty_ids_change_nothing(trainer):
    trained = trainer("one_device")
    with trained.scope():
        model = build(OPTIMIZERS["adagrad"][2]())
    inputs = keras.Input((0,), dtype="int32")
    table = model.layers[1]
    with trained.scope():
        empty = keras.Model(inputs, keras.ops.sum(table(inputs), (1, 2))[:, None])
        empty.compile(OPTIMIZERS["adagrad"][2](), "mse")
    empty.fit(np.zeros((BATCH, 0), np.int32), TARGETS[0], batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(empty.get_weights()[0], START)


def test_every_elementwise_optimizer_updates_rows(trainer):
    """The rows of one step are those of an update of the whole table, whatever the formula reads."""
    for kind in ELEMENTWISE:
        tables = []
        for mode in ("lazy", "off"):
            trained = trainer("one_device", mode)
            with trained.scope():
                optimizer = kind(RATE)
                optimizer.exclude_from_weight_decay(var_names=["embeddings"])
                model = build(optimizer)
            ids, targets = IDS[0], TARGETS[0]
            model.fit(ids, targets, batch_size=BATCH, verbose=0)
            tables.append(model.get_weights()[0][np.unique(ids)])
        np.testing.assert_allclose(*tables, rtol=1e-5, atol=1e-6, err_msg=kind.__name__)
