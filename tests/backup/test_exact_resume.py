"""A resumed training draws the random numbers that an uninterrupted one draws; what it cannot is in test_inexact_resume.py."""

from __future__ import annotations

import random
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.backup.test_backup import Interrupt, Interrupted
from tests.helpers.reused_model import ReusedModel
from tfdist import data as data_lib

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of data of unknown size

EXAMPLES, BATCH = 40, 8
STEPS = EXAMPLES // BATCH
rng = np.random.default_rng(0)
X = rng.standard_normal((EXAMPLES, 4, 4, 1), np.float32)
Y = rng.integers(0, 3, EXAMPLES).astype(np.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def trainer(mirrored):
    return lambda: tfdist.Trainer(mirrored)  # a new one for each fit, as it keeps its backup


def plain():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def mapped(draw, parallel=None, batch=BATCH):
    return plain().shuffle(20).batch(batch).map(lambda x, y: (draw(x), y), num_parallel_calls=parallel)


def flipped(dataset=mapped, **how):
    flip = keras.layers.RandomFlip()
    return dataset(lambda x: flip(x, training=True), **how)


def dropped():
    drop = keras.layers.Dropout(0.5)
    return mapped(lambda x: drop(x, training=True))


def generated(**how):
    generator = tf.random.Generator.from_seed(5)
    return mapped(lambda x: x + generator.normal(tf.shape(x)), **how)


def files(number):
    return tf.data.Dataset.range(5 * number, 5 * number + 5).map(
        lambda index: (tf.gather(X, index), tf.gather(Y, index))
    )


def interleaved():
    return tf.data.Dataset.range(EXAMPLES // 5).shuffle(8).interleave(files, cycle_length=2).shuffle(20).batch(BATCH)


def interleaved_and_generated():
    generator = tf.random.Generator.from_seed(5)
    return interleaved().map(lambda x, y: (x + generator.normal(tf.shape(x)), y))


def python_batches():
    for index in np.random.permutation(EXAMPLES).reshape(STEPS, BATCH):
        yield X[index], Y[index]


def from_python():
    specs = (tf.TensorSpec([None, 4, 4, 1], tf.float32), tf.TensorSpec([None], tf.int32))
    return tf.data.Dataset.from_generator(python_batches, output_signature=specs)


class Batches(keras.utils.PyDataset):
    """Without random numbers; Keras shuffles its batches."""

    def __init__(self, rng=np.random, **how):
        super().__init__(**how)
        self.rng = rng
        self.order = np.arange(EXAMPLES)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        return X[chosen], Y[chosen]


class Shuffled(Batches):
    def on_epoch_end(self):
        self.rng.shuffle(self.order)


class Noisy(Batches):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.rng.normal(size=x.shape), y


class NoisyLater(Noisy):
    """Draws from its second batch on."""

    def __getitem__(self, index):
        return (Noisy if index else Batches).__getitem__(self, index)


class NoisyByKeras(Batches):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(4)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + keras.ops.convert_to_numpy(keras.random.normal(x.shape, seed=self.seeds)), y


class NoisyShuffled(Shuffled, Noisy):
    """Draws for its order from the generator of its noise."""


class Keeping(Shuffled, Noisy):
    """With a state."""

    def state_dict(self):
        return {"order": self.order, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.order = np.array(state["order"])
        self.rng.bit_generator.state = state["rng"]


def own():
    return np.random.default_rng(4)


def numpy_noise(**how):
    generator = own()

    def draw(x):
        return x + generator.normal(size=x.shape).astype(np.float32)

    return mapped(lambda x: tf.ensure_shape(tf.numpy_function(draw, [x], tf.float32), x.shape), **how)


OF_MODULE = {}
SHAPE = (BATCH, 4, 4, 1)


def draw_from_module(shape):
    return OF_MODULE["rng"].normal(size=shape).astype(np.float32)


def global_noise():
    OF_MODULE["rng"] = own()
    noise = lambda: draw_from_module(SHAPE)  # noqa: E731
    return mapped(lambda x: x + tf.ensure_shape(tf.numpy_function(noise, [], tf.float32), SHAPE))


class DrawsRate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.02 + 0.02 * np.random.random() + 0.02 * random.random()


class Noise(keras.layers.Layer):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x, training=False):
        return x + self.draw((4, 4, 1)) if training else x


class OwnStep(keras.Sequential):
    draw = None

    def train_step(self, data):
        x, y = data
        return super().train_step((x + self.draw((4, 4, 1)), y))


def noisy_loss(draw):
    return lambda y, p: keras.ops.mean(
        keras.losses.sparse_categorical_crossentropy(y, p + draw((3,)), from_logits=True)
    )


# Several that draw by states of their own: one that was not restored would make the weights others.
# Each program has a generator of Keras' of its own, which a step holds that draws from it: it cannot be reused.
BY_KERAS = {"reuse": False}
TOGETHER = {"data": interleaved_and_generated, "callback": DrawsRate, "step": keras.random.normal, **BY_KERAS}
PLAIN = {"data": lambda: plain().shuffle(20).batch(BATCH)}
EXACT = {
    "flip": {"data": flipped},
    "dropout": {"data": dropped},
    "generator": {"data": generated},
    "flip_in_function": {"data": lambda: lambda _: flipped(batch=BATCH // 2)},  # each replica takes a batch
    "keras_random_in_map": {"data": lambda: mapped(lambda x: x + keras.random.normal((4, 4, 1)))},
    "flip_of_endless": {"data": lambda: flipped().repeat(), "steps_per_epoch": STEPS - 1},
    "shuffle_before_cache": {"data": lambda: plain().shuffle(20).cache().batch(BATCH)},
    "flip_before_cache": {"data": lambda: flipped().cache().shuffle(3)},
    "interleave": {"data": interleaved},
    "shuffle_before_repeat": {"data": lambda: plain().shuffle(20).batch(BATCH).repeat(2)},
    "from_generator": {"data": from_python},
    "py_dataset": {"data": Batches},
    "py_dataset_shuffled": {"data": Shuffled},
    "py_dataset_shuffled_by_its_own": {"data": lambda: Shuffled(own()), "shuffle": False},
    "py_dataset_noisy": {"data": Noisy},
    "py_dataset_noisy_by_its_own": {"data": lambda: Noisy(own())},
    "py_dataset_noisy_by_keras": {"data": NoisyByKeras},
    "py_dataset_noisy_later": {"data": lambda: NoisyLater(own())},
    "py_dataset_noisy_shuffled": {"data": NoisyShuffled},
    "py_dataset_noisy_shuffled_by_its_own": {"data": lambda: NoisyShuffled(own())},
    "py_dataset_worker_threads": {"data": lambda: Shuffled(workers=2, max_queue_size=2)},
    "py_dataset_worker_processes": {"data": lambda: Shuffled(own(), workers=2, use_multiprocessing=True)},
    "numpy_function": {"data": numpy_noise},
    "numpy_function_of_global": {"data": global_noise},
    "callback": {"callback": DrawsRate},
    "py_dataset_with_state": {"data": lambda: Keeping(own())},
    "keras_random_in_layer": {"layer": lambda: Noise(keras.random.normal), **BY_KERAS},
    "keras_random_in_loss": {"loss": lambda: noisy_loss(keras.random.normal), **BY_KERAS},
    "keras_random_in_step": {"step": keras.random.normal, **BY_KERAS},
    "generator_interleave_callback_and_step": TOGETHER,
    # These were exact before.
    "epochs": {"data": lambda: lambda c: data_lib.epochs((X, Y), c, BATCH, 5), "steps_per_epoch": STEPS},
    "layers": {"layer": lambda: keras.Sequential([keras.layers.RandomFlip(), keras.layers.Dropout(0.3)])},
}
QUICK = (
    "generator_interleave_callback_and_step",
    "py_dataset_noisy_shuffled_by_its_own",
    "py_dataset_worker_threads",
)
FULL = (
    "generator",
    "interleave",
    "keras_random_in_step",
    "callback",
    "flip",
    "flip_before_cache",
    "py_dataset_shuffled",
    "py_dataset_worker_processes",
    "layers",
    "numpy_function",
    "keras_random_in_loss",
)  # amid an epoch; all others are slow


_reused: dict[object, ReusedModel] = {}


def make_model(trainer, layer, loss, step):
    with trainer.scope():
        middle = [layer()] if layer else []
        layers = [keras.Input((4, 4, 1)), *middle, keras.layers.Flatten(), keras.layers.Dense(3)]
        model = (OwnStep if step else keras.Sequential)(layers)
        if step:
            model.draw = step
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss())
    return model


def plain_loss():
    return LOSS


def train(
    trainer,
    backup=None,
    interrupt=None,
    data=PLAIN["data"],
    layer=None,
    loss=plain_loss,
    step=None,
    callback=None,
    reuse=True,
    **fit,
):
    """Trains as a program does that is started anew; returns the weights, or None if it was interrupted."""
    trainer = trainer()
    key = (layer, loss, step)
    if key not in _reused or not reuse:
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        _reused[key] = ReusedModel(make_model(trainer, layer, loss, step))
    keras.utils.set_random_seed(3)
    given, model = data(), _reused[key].reset()
    callbacks = [each for each in (interrupt, backup, callback and callback()) if each]
    try:
        trainer.fit(model, given, epochs=3, verbose=0, callbacks=callbacks, **fit)
    except Interrupted:
        return None
    return model.get_weights()


@pytest.fixture(autouse=True)
def listener():
    """Gives pytest its SIGTERM back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)


def backup(folder, save_freq):
    return tfdist.BackupAndRestore(folder / "backup", save_freq, save_before_preemption=False)


def resume(trainer, folder, how, steps, save_freq):
    assert train(trainer, backup(folder, save_freq), Interrupt(step=steps), **how) is None
    return train(trainer, backup(folder, save_freq), **how)


# Amid the second epoch; at the last step of an epoch, before its end; at the end of the second epoch.
MOMENTS = {"amid": (STEPS + 3, 2), "last_step": (2 * STEPS - 1, STEPS), "end": (2 * STEPS + 1, "epoch")}


def marks(case, moment):
    if moment != "amid" or case not in (*QUICK, *FULL):
        return pytest.mark.slow
    return pytest.mark.full if case in FULL else ()


@pytest.mark.parametrize(
    ("case", "moment"),
    [pytest.param(case, moment, marks=marks(case, moment)) for moment in MOMENTS for case in EXACT],
)
def test_a_resumed_training_draws_the_same_numbers(trainer, tmp_path, capsys, case, moment):
    how = EXACT[case]
    expected = train(trainer, **how)
    got = resume(trainer, tmp_path, how, *MOMENTS[moment])
    assert all(map(np.array_equal, got, expected))
    assert "exact" not in capsys.readouterr().out


@pytest.mark.full
def test_another_seed_gives_other_weights(trainer):
    """Or equal weights would prove nothing."""
    first, second = (train(trainer, data=lambda n=n: (np.random.seed(n), Shuffled())[1]) for n in (1, 2))
    assert not any(map(np.array_equal, first, second))


class Counts(keras.layers.Layer):
    """Counts examples, and adds them to a weight that the model reads."""

    def build(self, shape):
        how = {"shape": (), "initializer": "zeros", "trainable": False}
        self.count = self.add_weight(aggregation="sum", name="count", **how)
        self.first = self.add_weight(aggregation="only_first_replica", name="first", **how)

    def call(self, x):
        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        self.first.assign(tf.reduce_sum(x[0]))
        return x * (1 + self.count / 100)


def test_a_resumed_training_counts_on(trainer, tmp_path):
    expected = train(trainer, layer=Counts)
    got = resume(trainer, tmp_path, {"layer": Counts}, *MOMENTS["amid"])
    assert all(map(np.array_equal, got, expected))
    assert EXAMPLES * 3 in [float(value) for value in got if value.shape == ()]
