"""Trains by the models' own methods, as scripts do, plain or under a Trainer. Arguments: "plain" or a strategy, output folder, cases."""

import contextlib
import functools
import io
import json
import os
import pathlib
import sys

from tests.multiprocess import harness

name, out, *chosen = sys.argv[1:]
OUT = pathlib.Path(out)
OUT.mkdir(parents=True, exist_ok=True)
scope = contextlib.nullcontext
if name != "plain":
    import tfdist

    options = {"devices": 2} if name == "mirrored" else {}
    kept = tfdist.BackupAndRestore(OUT / "backup", delete_checkpoint=False)  # though the models are saved
    trainer = tfdist.Trainer(name, backup=kept, **options)
    scope = trainer.scope
task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 0}}'))["task"]
RANK = task["index"] if task["type"] == "worker" else 0

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers  # noqa: E402

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((21, 6)).astype(np.float32), rng.standard_normal((21, 2)).astype(np.float32)
quiet = functools.partial(dict, verbose=0)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


def dense():
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])
        model.compile(sgd(), "mse", metrics=["mae"])
    return model


def fit(model, *data, **kwargs):
    return model.fit(*data, **{"batch_size": 7, "shuffle": False, "verbose": 0, **kwargs}).history


@case
def methods():
    """Every method, and files that all ranks write to one path."""
    model = dense()
    files = [keras.callbacks.ModelCheckpoint(OUT / "best.keras", save_best_only=True)]
    files.append(keras.callbacks.CSVLogger(OUT / "log.csv"))
    found = {
        "fit": fit(model, X, Y, epochs=2, validation_data=(X, Y), callbacks=files),
        "evaluate": model.evaluate(X, Y, batch_size=4, verbose=0),
        "predict": model.predict(X, verbose=0),
        "predict one": model.predict(X[:1], verbose=0),
        "predict_on_batch": model.predict_on_batch(X[:5]),
    }
    for method in (model.train_on_batch, model.test_on_batch):
        model.reset_metrics()  # as Keras itself does since 3.15
        found[method.__name__] = method(X[:5], Y[:5])
    found["weights"] = model.get_weights()
    for number in range(3):
        model.save(OUT / "model.keras")
        found[f"loaded {number}"] = keras.models.load_model(OUT / "model.keras").get_weights()
        model.save_weights(OUT / "model.weights.h5")
        model.load_weights(OUT / "model.weights.h5")
    found["after loading"] = model.evaluate(X, Y, verbose=0)
    return found


@case
def in_scope():
    """As Keras' guide has it: all within the scope, with a ModelCheckpoint."""
    model = dense()
    with scope():
        history = fit(model, X, Y, epochs=2, callbacks=[keras.callbacks.ModelCheckpoint(OUT / "scope.keras")])
        model.save(OUT / "scope2.keras")
        return history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)


class VAE(keras.Model):
    """No `call`, no layer that is built."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def losses_of(self, data):
        x = data[0] if isinstance(data, tuple) else data
        mean, log_variance = tf.split(self.encoder(x), 2, -1)
        rebuilt = self.decoder(mean + 0.5 * tf.exp(0.5 * log_variance))
        divergence = tf.reduce_mean(mean**2 + tf.exp(log_variance) - 1 - log_variance)
        return tf.reduce_mean(tf.reduce_sum((x - rebuilt) ** 2, -1)) + 0.5 * divergence

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.losses_of(data)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.losses_of(data))
        return {"loss": self.tracker.result()}


def vae():
    keras.utils.set_random_seed(1)
    with scope():
        model = VAE()
        model.compile(optimizer=sgd())
    return model


@case
def autoencoder():
    model = vae()
    history = fit(model, X[:14], epochs=2)
    return history, model.evaluate(X, batch_size=7, verbose=0), model.encoder.predict(X, verbose=0), model.get_weights()


@case
def evaluated_first():
    model = vae()
    return model.evaluate(X, batch_size=7, verbose=0), fit(model, X[:14], epochs=2), model.get_weights()


class GAN(keras.Model):
    """Two unbuilt optimizers that `compile` does not know, and two models."""

    def __init__(self, rounds, penalty):
        super().__init__()
        self.critic = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(6)])
        self.rounds, self.penalty = rounds, penalty

    def compile(self, optimizers, loss):
        super().compile()
        self.optimizers, self.loss_of = optimizers, loss

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        size = tf.shape(x)[0]
        for _ in range(self.rounds):
            both = tf.concat([self.generator(x[:, :3]), x], 0)
            labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
            with tf.GradientTape() as tape:
                critic_loss = self.loss_of(labels, self.critic(both))
                if self.penalty:
                    with tf.GradientTape() as inner:
                        inner.watch(x)
                        judged = self.critic(x)
                    norm = tf.norm(inner.gradient(judged, x), axis=-1)
                    critic_loss += tf.reduce_mean((norm - 1) ** 2)
            weights = self.critic.trainable_weights
            self.optimizers["critic"].apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.zeros((size, 1)), self.critic(self.generator(x[:, :3])))
        weights = self.generator.trainable_weights
        self.optimizers["generator"].apply(tape.gradient(loss, weights), weights)
        return {"critic": critic_loss, "generator": loss}


def gan(rounds=1, penalty=False):
    keras.utils.set_random_seed(1)
    with scope():
        model = GAN(rounds, penalty)
        model.compile({"critic": sgd(), "generator": sgd()}, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def trained(model):
    data = tf.data.Dataset.from_tensor_slices(X[:20]).batch(10)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.generator.predict(X[:, :3], verbose=0), model.critic.get_weights()


@case
def adversaries():
    return trained(gan())


@case
def critic_of_three_rounds():
    return trained(gan(3, penalty=True))


@case
def adversaries_by_batches():
    model = gan()
    return [model.train_on_batch(X[:10]) for _ in range(3)], model.critic.get_weights()


@case
def second_trainer():
    """As a notebook's cell that is run again: another Trainer each time, of whose collectives none may meet another's."""
    global scope
    first, found = scope, []
    for units in (3, 9, 4):
        if name != "plain":
            scope = tfdist.Trainer(name, **options).scope
        keras.utils.set_random_seed(1)
        with scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(units), layers.Dense(2)])
            model.compile(sgd(), "mse")
        found.append((fit(model, X, Y, epochs=2), model.evaluate(X, Y, verbose=0)))
    scope = first
    return found


@case
def shuffled():
    """What each step saw, for shuffled datasets: its loss, as the weights stay."""

    def losses(make):
        model = dense()
        model.optimizer.learning_rate.assign(0.0)
        seen = []
        see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
        keras.utils.set_random_seed(5)
        model.fit(make(), epochs=3, callbacks=[see], verbose=0)
        return seen

    examples = lambda: tf.data.Dataset.from_tensor_slices((X[:20], Y[:20]))  # noqa: E731
    return {
        "seed of its own": losses(lambda: examples().shuffle(20, seed=1).batch(4)),
        "global seed": losses(lambda: examples().shuffle(20).batch(4)),
        "cached": losses(lambda: examples().cache().shuffle(9, seed=1).batch(4).prefetch(2)),
        "of unknown number": losses(
            lambda: examples().shuffle(20, seed=1).filter(lambda x, y: x[0] < 1.0).batch(4, drop_remainder=True)
        ),
        "once": losses(lambda: examples().shuffle(20, seed=1, reshuffle_each_iteration=False).batch(4)),
        "batches": losses(lambda: examples().batch(4).shuffle(20, seed=1)),
    }


def said_without_scope():
    """What each method of a model that was made outside of the scope prints, the first training twice."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)], name="forgotten")
    model.compile(sgd(), "mse")
    said = []
    for method in (model.predict_on_batch, model.evaluate, model.fit, model.fit, model.train_on_batch):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            method(X) if method == model.predict_on_batch else method(
                X, Y, **({} if "batch" in method.__name__ else quiet())
            )
        said.append(out.getvalue())
    return said


if __name__ == "__main__":
    results = {}
    for each in chosen or CASES:
        results[each] = CASES[each]()
        if name != "plain":
            results[f"backups of {each}"] = sorted(path.name for path in (OUT / "backup").rglob("step-*"))
            trainer.delete_backup()
        print(each, flush=True)
    results["said without scope"] = said_without_scope()
    results["files"] = sorted(path.name for path in OUT.iterdir() if path.suffix in (".keras", ".h5", ".csv"))
    harness.store(out, RANK, results)
