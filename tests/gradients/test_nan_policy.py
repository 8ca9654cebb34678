"""`nan_policy`: two replicas train what a plain loop trains that leaves the batch out whose gradient is not finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.monitoring
from tests.helpers import tiers
from tests.monitoring.test_tensorboard import curves
from tfdist.compression import ErrorFeedback, TopK
from tfdist.errors import ConfigError
from tfdist.gradients.finite_updates import skipped_updates

RATE, MOMENTUM, BATCH, STEPS = 0.05, 0.9, 4, 8
rng = np.random.default_rng(0)
X = rng.standard_normal((BATCH * STEPS, 3)).astype(np.float32)
Y = rng.standard_normal((BATCH * STEPS, 1)).astype(np.float32)


def with_nan(*steps):
    """Returns the examples with one of each of these steps, the second replica's, that is NaN."""
    x = X.copy()
    x[[BATCH * step + 3 for step in steps]] = np.nan
    return x


def trained_plainly(left_out, accumulation=1):
    """Returns weights, moving mean, and loss of an epoch by plain arithmetic, without these steps."""
    w, velocity, mean, losses, grads = np.full((3, 1), 0.5), np.zeros((3, 1)), np.zeros(3), [], []
    for step in set(range(STEPS)) - set(left_out):
        x, y = X[step * BATCH :][:BATCH], Y[step * BATCH :][:BATCH]
        error = x @ w - y
        losses.append((error**2).mean())
        mean = mean / 2 + x.mean(0) / 2
        grads.append(2 * x.T @ error / BATCH)
        if len(grads) == accumulation:
            velocity = MOMENTUM * velocity - RATE * np.mean(grads, 0)
            w, grads = w + velocity, []
    return w, mean, np.mean(losses)


def build(trainer, accumulation=1, loss="mse", **compiled):
    with trainer.scope():
        x = keras.Input((3,))
        norm = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
        half = keras.initializers.Constant(0.5)
        out = keras.layers.Dense(1, use_bias=False, kernel_initializer=half)(x) + 0 * keras.ops.sum(norm(x), -1, True)
        model = keras.Model(x, out)
        steps = accumulation if accumulation > 1 else None
        optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM, gradient_accumulation_steps=steps)
        model.compile(optimizer, loss, **compiled)
    return model


def fit(trainer, model, x, y=Y):
    return trainer.fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0).history


EXECUTIONS = [{}, {"steps_per_execution": 4}, {"jit_compile": True}, {"run_eagerly": True}]
COMPRESSIONS = [None, "int8", "topk"]
CASES = [(c, n, how, at) for c in COMPRESSIONS for n in (1, 2) for how in EXECUTIONS for at in ((2,), (0, 5, 7))]
QUICK = [(None, 2, {"steps_per_execution": 4}, (0, 5, 7)), ("int8", 1, {}, (0, 5, 7))]


@pytest.mark.parametrize(("compression", "accumulation", "how", "at"), tiers.cases(CASES, quick=QUICK))
def test_two_replicas_skip_what_a_plain_loop_leaves_out(mirrored, compression, accumulation, how, at):
    # Of which topk sends all, so that the plain loop is its reference, too; int8 rounds.
    options = ErrorFeedback(TopK(compress_ratio=1.0)) if compression == "topk" else compression
    trainer = tfdist.Trainer(mirrored, nan_policy="skip", compression=options)
    model = build(trainer, accumulation, **how)
    history = fit(trainer, model, with_nan(*at))
    w, mean, loss = trained_plainly(at, accumulation)
    weights = {weight.path.split("/")[-1]: weight.numpy() for weight in model.weights}
    near = 2e-2 if compression == "int8" else 1e-5
    np.testing.assert_allclose(weights["kernel"], w, atol=near)
    np.testing.assert_allclose(weights["moving_mean"], mean, atol=1e-5)
    np.testing.assert_allclose(history["loss"], loss, rtol=near)
    assert int(model.optimizer.iterations.numpy()) == (STEPS - len(at)) // accumulation
    assert [int(number.numpy()) for number in skipped_updates(model)] == [len(at)]
    clean = fit(trainer, model, X)["loss"][0]
    assert clean < 2 * loss, "no error that is fed back is NaN"


@pytest.mark.parametrize("strategy", ["one_device", pytest.param("central_storage", marks=pytest.mark.full)])
def test_other_strategies_skip_too(strategy):
    trainer = tfdist.Trainer(strategy, nan_policy="skip", **({"devices": 2} if strategy == "central_storage" else {}))
    model = build(trainer)
    np.testing.assert_allclose(fit(trainer, model, with_nan(2))["loss"], trained_plainly([2])[2], rtol=1e-5)
    np.testing.assert_allclose(model.trainable_weights[0].numpy(), trained_plainly([2])[0], atol=1e-5)


def of_finite_loss(y, out):
    """The mean square error; the gradient of an example with a target above 100 is NaN, its loss is not."""
    return (out - y) ** 2 + tf.sqrt(tf.where(y > 100, 0 * out, 1.0))


def with_a_large_target():
    y = Y.copy()
    y[BATCH * 5] = 101
    return y


def test_stop_names_the_step_and_keeps_the_weights_from_before(mirrored):
    trainer = tfdist.Trainer(mirrored, nan_policy="stop")
    model = build(trainer, loss=of_finite_loss)
    before = model.get_weights()
    with pytest.raises(FloatingPointError, match=r"^Step 3 of epoch 1: the loss is not finite, and nan_policy is"):
        fit(trainer, model, with_nan(2))
    np.testing.assert_allclose(model.trainable_weights[0].numpy(), trained_plainly(range(2, STEPS))[0], atol=1e-5)
    model.set_weights(before)
    with pytest.raises(FloatingPointError, match=r"^Step 6 of epoch 1: a gradient is not finite, and nan_policy is"):
        fit(trainer, model, X, with_a_large_target())


@pytest.mark.full
def test_stop_names_the_steps_of_an_execution(mirrored):
    trainer = tfdist.Trainer(mirrored, nan_policy="stop")
    model = build(trainer, loss=of_finite_loss, steps_per_execution=4)
    with pytest.raises(FloatingPointError, match=r"^A step of 5 to 8 of epoch 1: a gradient is not finite, and nan_p"):
        fit(trainer, model, X, with_a_large_target())


def test_ignore_trains_on_with_nan(mirrored):
    trainer = tfdist.Trainer(mirrored)
    model = build(trainer)
    assert (
        np.isnan(fit(trainer, model, with_nan(2))["loss"]).all() and np.isnan(model.trainable_weights[0].numpy()).all()
    )


def test_a_loss_scale_leaves_out_by_itself_what_does_not_stop_the_training(mirrored):
    trainer = tfdist.Trainer(mirrored, nan_policy="stop")
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=2.0**15)
        model.compile(scaled, of_finite_loss)
    assert np.isfinite(fit(trainer, model, X, with_a_large_target())["loss"]).all()
    assert np.isfinite(model.trainable_weights[0].numpy()).all()
    assert not skipped_updates(model)


def test_an_unknown_policy_is_one_sentence(mirrored):
    with pytest.raises(ConfigError, match="unknown nan_policy 'skipp'; did you mean 'skip'"):
        tfdist.Trainer(mirrored, nan_policy="skipp")


def test_skipped_updates_are_a_curve(mirrored, tmp_path):
    trainer = tfdist.Trainer(mirrored, nan_policy="skip")
    callback = tfdist.monitoring.TensorBoard(tmp_path, "batch")
    trainer.fit(build(trainer), with_nan(2, 5), Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[callback])
    found = curves(tmp_path)["train"]["train/skipped_updates"]
    assert found == [(step, float((step > 2) + (step > 5))) for step in range(1, STEPS + 1)]
