"""Transfer learning: a network learns the digits 0 to 4 and then, from 10 images of each, the digits 5 to 9.

    python examples/transfer_learning.py                                # one process
    tfdist launch --workers=2 -- python examples/transfer_learning.py   # two processes
    tfdist launch --workers=2 --ps=1 -- python examples/transfer_learning.py --strategy=parameter_server

Between the two tasks the network is saved and loaded, like a published network. First a new head is trained on the frozen
network, then all layers at a smaller learning rate. Takes about 20 s on 2 cores; expect an accuracy above 0.9 on the new digits.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.tasks import digits


def images_of(classes: range, subset: tuple[np.ndarray, np.ndarray], per_class: int | None = None) -> tf.data.Dataset:
    """Returns the images of five classes, labelled 0 to 4: the first `per_class` images of each class, or all."""
    images, labels = subset
    chosen = np.concatenate([np.flatnonzero(labels == digit)[:per_class] for digit in classes])
    pairs = tf.data.Dataset.from_tensor_slices((images[chosen], labels[chosen] - classes.start))
    return pairs.shuffle(len(chosen), seed=1).batch(16).take(args.steps).prefetch(tf.data.AUTOTUNE)


def build_network() -> keras.Model:
    """Returns a network that computes 256 features of an image."""
    layers = [keras.Input((8, 8, 1))]
    for filters in (32, 64):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    return keras.Sequential([*layers, keras.layers.Flatten()], name="network")


def add_head(network: keras.Model, **kwargs) -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, keras.layers.Dense(5)(network(inputs, **kwargs)))


def compile_model(model: keras.Model, learning_rate: float) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])


def report(name: str, model: keras.Model, data: tf.data.Dataset) -> None:
    accuracy = model.evaluate(data, return_dict=True, verbose=0)["accuracy"]
    if trainer.is_chief:
        print(f"{name}: accuracy {accuracy:.4f}, {trainer.num_replicas} replicas")


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="multi_worker_mirrored")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=-1, help="steps per epoch; default: all images")
args = parser.parse_args()

trainer = tfdist.Trainer(args.strategy)  # before any tensor
keras.utils.set_random_seed(1)
train, validation = digits.load()

# 1. Train the network on the first task, and save it without its head.
with trainer.scope():
    network = build_network()
    model = add_head(network)
    compile_model(model, 3e-3)
model.fit(images_of(range(5), train), epochs=args.epochs, verbose=2)
report("digits 0 to 4", model, images_of(range(5), validation))
pathlib.Path("runs").mkdir(exist_ok=True)
trainer.save(network, "runs/network.keras")

# 2. Train a new head on the second task. Frozen layers are not updated, and cost no communication.
few, new = images_of(range(5, 10), train, per_class=10), images_of(range(5, 10), validation)
with trainer.scope():
    network = keras.models.load_model("runs/network.keras")
    network.trainable = False
    model = add_head(network, training=False)  # BatchNormalization keeps its statistics, thawed or not
    compile_model(model, 1e-2)
model.fit(few, epochs=3 * args.epochs, verbose=2)
report("digits 5 to 9, frozen network", model, new)

# 3. Train all layers at a smaller rate. `trainable` takes effect when the model is compiled: compile it again.
with trainer.scope():
    network.trainable = True
    compile_model(model, 3e-4)
stopping = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
model.fit(few, epochs=2 * args.epochs, callbacks=[stopping], verbose=2)
report("digits 5 to 9, thawed network", model, new)
trainer.save(model, "runs/transfer_learning.keras")
