"""Models train by their own methods under a Trainer as plain Keras trains them on one device.

Each function trains in a scope; the right values are those of the same function in no scope, where Keras runs eagerly.
"""

import contextlib
import logging

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.cases.arms import MIRRORED, ONE_DEVICE, SERVERS, WORKERS
from tests.cases.case import case, logged

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((21, 6)).astype(np.float32), rng.standard_normal((21, 2)).astype(np.float32)
PLAIN = contextlib.nullcontext


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


def dense(scope):
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])
        model.compile(sgd(), "mse", metrics=["mae"], run_eagerly=scope is PLAIN)
    return model


def fit(model, *data, **kwargs):
    return model.fit(*data, **{"batch_size": 7, "shuffle": False, "verbose": 0, **kwargs}).history


def in_no_scope(train):
    logger = logging.getLogger("tfdist")
    logger.disabled = True  # it warns of models in no scope
    try:
        return train(PLAIN)
    finally:
        logger.disabled = False


def compared(world, train, keeps_backups=True):
    """Compares a training in the scope of a Trainer, which must make backups, with the same in no scope."""
    folder = world.folder / "backup"
    trainer = tfdist.Trainer(world.trainer.strategy, backup=tfdist.BackupAndRestore(folder, delete_checkpoint=False))
    pairs = {"trained": (train(trainer.scope), in_no_scope(train))}
    if keeps_backups:
        pairs["has backups"] = (any(folder.rglob("step-*")), True)
    return pairs


def all_methods(model, callbacks=()):
    found = {
        "fit": fit(model, X, Y, epochs=2, validation_data=(X, Y), callbacks=[*callbacks]),
        "evaluate": model.evaluate(X, Y, batch_size=4, verbose=0),
        "predict": model.predict(X, verbose=0),
        "predict one": model.predict(X[:1], verbose=0),
        "predict_on_batch": model.predict_on_batch(X[:5]),
    }
    for method in (model.train_on_batch, model.test_on_batch):
        model.reset_metrics()  # as Keras itself does since 3.15
        found[method.__name__] = method(X[:5], Y[:5])
    return {**found, "weights": model.get_weights()}


@case(MIRRORED, WORKERS, SERVERS, full=(MIRRORED, SERVERS))
def methods(world):
    """Every method, and files that all ranks write to one path."""
    files = world.folder / "files"

    def train(scope):
        model = dense(scope)
        if scope is PLAIN:
            return all_methods(model)
        callbacks = [
            keras.callbacks.ModelCheckpoint(files / "best.keras", save_best_only=True),
            keras.callbacks.CSVLogger(files / "log.csv"),
        ]
        found = all_methods(model, callbacks)
        for _ in range(3):
            model.save(files / "model.keras")
            loaded = keras.models.load_model(files / "model.keras").get_weights()
            model.save_weights(files / "model.weights.h5")
            model.load_weights(files / "model.weights.h5")
            assert all(map(np.array_equal, loaded, found["weights"]))
        assert all(map(np.array_equal, model.get_weights(), found["weights"]))
        return found

    files.mkdir(exist_ok=True)
    pairs = compared(world, train)
    names = ["best.keras", "log.csv", "model.keras", "model.weights.h5"]
    return {**pairs, "whole files, and no others": (sorted(path.name for path in files.iterdir()), names)}


@case(MIRRORED, WORKERS, SERVERS, full=True)
def in_scope(world):
    """As Keras' guide has it: all within the scope, with a ModelCheckpoint."""

    def train(scope):
        model = dense(scope)
        path = world.folder / "scope.keras"
        callbacks = [] if scope is PLAIN else [keras.callbacks.ModelCheckpoint(path)]
        with scope():
            history = fit(model, X, Y, epochs=2, callbacks=callbacks)
            if scope is not PLAIN:
                model.save(path)
            return history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)

    return compared(world, train)


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


def vae(scope):
    keras.utils.set_random_seed(1)
    with scope():
        model = VAE()
        model.compile(optimizer=sgd(), run_eagerly=scope is PLAIN)
    return model


@case(MIRRORED, WORKERS, SERVERS, full=True)
def autoencoder(world):
    def train(scope):
        model = vae(scope)
        history = fit(model, X[:14], epochs=2)
        evaluated = model.evaluate(X, batch_size=7, verbose=0)
        return history, evaluated, model.encoder.predict(X, verbose=0), model.get_weights()

    return compared(world, train)


@case(MIRRORED, WORKERS, SERVERS, full=True)
def evaluated_first(world):
    def train(scope):
        model = vae(scope)
        return model.evaluate(X, batch_size=7, verbose=0), fit(model, X[:14], epochs=2), model.get_weights()

    return compared(world, train)


class GAN(keras.Model):
    """Two unbuilt optimizers that `compile` does not know, and two models."""

    def __init__(self, rounds, penalty):
        super().__init__()
        self.critic = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(6)])
        self.rounds, self.penalty = rounds, penalty

    def compile(self, optimizers, loss, **how):
        super().compile(**how)
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


def gan(scope, rounds=1, penalty=False):
    keras.utils.set_random_seed(1)
    with scope():
        model = GAN(rounds, penalty)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile({"critic": sgd(), "generator": sgd()}, loss, run_eagerly=scope is PLAIN)
    return model


def trained(model):
    data = tf.data.Dataset.from_tensor_slices(X[:20]).batch(10)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.generator.predict(X[:, :3], verbose=0), model.critic.get_weights()


@case(MIRRORED, WORKERS, SERVERS)
def adversaries(world):
    return compared(world, lambda scope: trained(gan(scope)))


@case(MIRRORED, WORKERS, SERVERS, full=True)
def critic_of_three_rounds(world):
    return compared(world, lambda scope: trained(gan(scope, 3, penalty=True)))


@case(MIRRORED, WORKERS, SERVERS)
def adversaries_by_batches(world):
    def train(scope):
        model = gan(scope)
        return [model.train_on_batch(X[:10]) for _ in range(3)], model.critic.get_weights()

    return compared(world, train, keeps_backups=False)


def examples():
    return tf.data.Dataset.from_tensor_slices((X[:20], Y[:20]))


SHUFFLED = {
    "seed of its own": lambda: examples().shuffle(20, seed=1).batch(4),
    "global seed": lambda: examples().shuffle(20).batch(4),
    "cached": lambda: examples().cache().shuffle(9, seed=1).batch(4).prefetch(2),
    "of unknown number": lambda: (
        examples().shuffle(20, seed=1).filter(lambda x, y: x[0] < 1.0).batch(4, drop_remainder=True)
    ),
    "once": lambda: examples().shuffle(20, seed=1, reshuffle_each_iteration=False).batch(4),
    "batches": lambda: examples().batch(4).shuffle(20, seed=1),
}


@case(ONE_DEVICE, MIRRORED, WORKERS, full=True)
def shuffled(world):
    """What each step saw: its loss, as the weights stay."""

    def train(scope):
        model = dense(scope)
        model.optimizer.learning_rate.assign(0.0)
        losses = {}
        for name, make in SHUFFLED.items():
            seen = losses[name] = []
            keras.utils.set_random_seed(5)
            see = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda _, logs, seen=seen: seen.append(logs["loss"])
            )
            model.fit(make(), epochs=3, callbacks=[see], verbose=0)
        return losses

    return compared(world, train)


def warnings_without_scope():
    """Returns what each method of a model that was made outside of the scope logs, the first training twice."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)], name="forgotten")
    model.compile(sgd(), "mse")
    calls = (
        lambda: model.predict_on_batch(X),
        lambda: model.evaluate(X, Y, verbose=0),
        lambda: model.fit(X, Y, verbose=0),
        lambda: model.fit(X, Y, verbose=0),
        lambda: model.train_on_batch(X, Y),
    )
    found = []
    for call in calls:
        with logged() as lines:
            call()
        found.append([line[: len(FORGOTTEN)] for line in lines])
    return found


FORGOTTEN = "model 'forgotten' was not built in the scope of this process's Trainer"


@case(MIRRORED, WORKERS, SERVERS, warning=FORGOTTEN)
def the_first_training_of_a_model_without_a_scope(world):
    return {"warnings on each worker": (warnings_without_scope(), [[], [], [FORGOTTEN], [], []])}


@case(ONE_DEVICE)
def with_one_replica_a_model_without_a_scope_is_no_fault(world):
    return {"warnings": (warnings_without_scope(), [[]] * 5)}


@case(MIRRORED, error=r"model 'outside' was compiled in the scope of this process's Trainer, and built outside of it")
def a_model_that_is_compiled_in_the_scope_and_built_outside(world):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)], name="outside")
    with world.scope():
        model.compile(sgd(), "mse")
    model.fit(X, Y, verbose=0)


# The last one: warnings of models without a scope come from the newest strategy.
@case(MIRRORED, WORKERS, full=True)
def second_trainer(world):
    """As a notebook's cell that is run again: another Trainer each time, of whose collectives none may meet another's."""
    options = {"devices": world.arm.devices} if world.arm.devices > 1 else {}
    pairs = {}
    for units in (3, 9, 4):

        def train(scope, units=units):
            keras.utils.set_random_seed(1)
            with scope():
                model = keras.Sequential([keras.Input((6,)), layers.Dense(units), layers.Dense(2)])
                model.compile(sgd(), "mse", run_eagerly=scope is PLAIN)
            return fit(model, X, Y, epochs=2), model.evaluate(X, Y, verbose=0)

        pairs[f"{units} units"] = train(tfdist.Trainer(world.arm.strategy, **options).scope), in_no_scope(train)
    return pairs
