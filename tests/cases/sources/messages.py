"""Code that no strategy of several tasks can run, each with the message that says what to do instead."""

import logging
import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case

X = np.arange(24, dtype="float32")[:, None]
BRANCH = r"applies an optimizer within tf\.cond.*apply it in each step, outside of them"


class Branches(keras.Model):
    """Applies its optimizer in a graph within that of its step."""

    branch = "cond"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        even = tf.convert_to_tensor(self.optimizer.iterations) % 2 == 0

        def update():
            if self.branch == "gradients":
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            else:
                self.optimizer.apply(grads, self.trainable_variables)
            return 0

        if self.branch == "while":
            tf.while_loop(lambda i: i < 1, lambda i: (i + 1 + update(),), [0])
        elif self.branch == "function":
            tf.function(update)()
        else:
            tf.cond(even, update, lambda: 1)
        return {"loss": loss}


def fit_branches(world, branch):
    with world.scope():
        inputs = keras.Input((1,))
        model = Branches(inputs, keras.layers.Dense(1)(inputs))
        model.branch = branch
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=8, verbose=0)


@case(MIRRORED, WORKERS, error=BRANCH)
def apply_within_cond(world):
    fit_branches(world, "cond")


@case(MIRRORED, WORKERS, error=BRANCH)
def apply_gradients_within_cond(world):
    fit_branches(world, "gradients")


@case(MIRRORED, WORKERS, error=BRANCH, full=True)
def apply_within_while_loop(world):
    fit_branches(world, "while")


@case(MIRRORED, WORKERS, error=BRANCH)
def apply_within_a_function(world):
    fit_branches(world, "function")


@case(SERVERS, error=r"within tf\.cond, tf\.while_loop or a nested tf\.function")
def apply_within_cond_under_parameter_servers(world):
    fit_branches(world, "cond")


@case(WORKERS, error=r"variable of int8 \(kernel\).*save it; load and quantize it in one process")
def a_quantized_model(world):
    with world.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.quantize("int8")


@case(SERVERS, error=r"the Trainer distributes data itself: give fit, evaluate or predict the dataset")
def a_dataset_distributed_by_hand(world):
    world.trainer.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, X)).batch(8))


@case(SERVERS, error=r"the Trainer distributes data itself: .* or the function \(tf\.distribute\.InputContext\)")
def a_dataset_function_distributed_by_hand(world):
    world.trainer.strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((X, X)).batch(8)
    )


@case(
    SERVERS,
    error=r"a resource of the chief that is no variable \(the writer of tf\.summary.*write summaries in a callback",
)
def a_summary_in_a_layer(world):
    writer = tf.summary.create_file_writer(os.path.join(world.folder, "summaries"))

    class Logs(keras.layers.Layer):
        def call(self, x):
            with writer.as_default(step=0):
                tf.summary.scalar("mean", tf.reduce_mean(x))
            return x

    with world.scope():
        model = keras.Sequential([keras.Input((1,)), Logs(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=8, verbose=0)


@case(WORKERS, error=r"`seed=` of keras\.utils\.image_dataset_from_directory")
def a_directory_shuffled_without_a_seed(world):
    folder = os.path.join(world.folder, f"images{world.rank}")
    for number in range(4):
        path = os.path.join(folder, f"class{number % 2}", f"{number}.png")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        tf.io.write_file(path, tf.io.encode_png(tf.fill([4, 4, 3], tf.constant(number, tf.uint8))))
    np.random.seed(world.rank)  # a worker that has drawn other numbers, as one with another start does
    data = keras.utils.image_dataset_from_directory(folder, batch_size=2, image_size=(4, 4), verbose=False)
    with world.scope():
        model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, verbose=0)


@case(MIRRORED, WORKERS)
def the_notice_about_keras_backups(world):
    """The chief alone logs it, and once, however often `fit` is called."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tfdist").addHandler(handler)
    try:
        for _ in range(2):
            with world.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            keep = keras.callbacks.BackupAndRestore(os.path.join(world.folder, "backups"))
            model.fit(X, X, batch_size=8, verbose=0, callbacks=[keep])
    finally:
        logging.getLogger("tfdist").removeHandler(handler)
    notices = [line for line in lines if "replaces keras.callbacks.BackupAndRestore" in line]
    return {"notices": (len(notices), int(world.rank == 0))}


HELPER = "import tfdist\n\n\ndef start():\n    return tfdist.Trainer('mirrored', devices=2)\n"
SCRIPT = "import keras\nimport helper\n\nmodel = keras.Sequential([keras.layers.Dense(1)])\nmodel.build((None, 1))\nhelper.start()\n"


@case(MIRRORED)
def a_trainer_that_a_helper_module_makes_too_late(world):
    os.makedirs(os.path.join(world.folder, "late"), exist_ok=True)
    script = os.path.join(world.folder, "late", "script.py")
    for name, text in ((script, SCRIPT), (os.path.join(world.folder, "late", "helper.py"), HELPER)):
        with open(name, "w") as file:
            file.write(text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    message = done.stderr.strip().splitlines()[-1]
    parts = (f"{script}:6: ", "after TensorFlow has started", "before line 4: model = keras.Sequential")
    return {part: (part in message, True) for part in parts}
