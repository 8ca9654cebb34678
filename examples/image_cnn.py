"""Image classification: a ResNet-18 on JPEG images in folders, one folder for each class.

    python examples/image_cnn.py                                # one process
    tfdist launch --workers=2 -- python examples/image_cnn.py   # two processes
    tfdist launch --workers=2 --ps=1 -- python examples/image_cnn.py --strategy=parameter_server

If the folder `runs/shapes` is missing, the script writes 2400 images to it: a circle, cross, square or triangle of random
size, colour and position on a noisy background. Takes about 2 minutes on 2 cores; expect a validation accuracy above 0.9.
"""

import argparse
import os
import pathlib
import shutil
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist

CLASSES = ("circle", "cross", "square", "triangle")
SIZE = 32


def draw(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Returns one image, `[SIZE, SIZE, 3]` uint8."""
    radius = rng.uniform(6, 12)
    down, right = np.indices((SIZE, SIZE)) - rng.uniform(radius, SIZE - radius, (2, 1, 1))
    inside = {
        "circle": np.hypot(down, right) < radius,
        "cross": (np.maximum(abs(down), abs(right)) < radius) & (np.minimum(abs(down), abs(right)) < radius / 3),
        "square": np.maximum(abs(down), abs(right)) < 0.85 * radius,
        "triangle": (abs(right) < (down + radius) / 2) & (down < radius),
    }[kind]
    image = np.where(inside[..., None], rng.uniform(120, 255, 3), rng.uniform(0, 120, 3))
    image += rng.normal(0, 20, image.shape)
    return image.clip(0, 255).astype(np.uint8)


def write_images(folder: pathlib.Path, images_per_class: int) -> None:
    """Writes the images of each class to a folder named after the class, unless `folder` exists."""
    if folder.exists():
        return
    rng = np.random.default_rng(1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    for kind in CLASSES:
        (unfinished / kind).mkdir()
        for number in range(images_per_class):
            jpeg = tf.io.encode_jpeg(draw(kind, rng), quality=90)
            (unfinished / kind / f"{number:04}.jpg").write_bytes(jpeg.numpy())
    try:
        os.rename(unfinished, folder)  # atomic, so that no worker reads an incomplete folder
    except OSError:  # another worker has already written the same images
        shutil.rmtree(unfinished)


def residual_block(x, filters: int, strides: int):
    """Returns two convolutions plus a shortcut, as in "Deep Residual Learning for Image Recognition" (He et al., 2015)."""
    shortcut = x
    if strides > 1:
        shortcut = normalize(keras.layers.Conv2D(filters, 1, strides, use_bias=False)(x))
    x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU()(normalize(x))
    x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return keras.layers.ReLU()(normalize(x) + shortcut)


def normalize(x):
    return keras.layers.BatchNormalization(momentum=0.9)(x)


def resnet18() -> keras.Model:
    """Returns a network of 11.2 million parameters. Its first layers augment, so that each replica draws its own numbers."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.RandomFlip("horizontal")(inputs)
    x = keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest")(x)
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(x)
    x = keras.layers.Conv2D(64, 3, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU()(normalize(x))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for filters in (64, 128, 256, 512):
        x = residual_block(x, filters, strides=1 if filters == 64 else 2)
        x = residual_block(x, filters, strides=1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(len(CLASSES))(x), name="resnet18")


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="multi_worker_mirrored")
parser.add_argument(
    "--images", type=pathlib.Path, default=pathlib.Path("runs/shapes"), help="folder that has one folder per class"
)
parser.add_argument(
    "--images_per_class", type=int, default=600, help="number of images to write if the folder is missing"
)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=-1, help="steps per epoch; default: all images")
args = parser.parse_args()

trainer = tfdist.Trainer(args.strategy)  # before any tensor
keras.utils.set_random_seed(1)
write_images(args.images, args.images_per_class)
train, validation = keras.utils.image_dataset_from_directory(
    args.images,
    image_size=(SIZE, SIZE),
    batch_size=32,  # over all replicas
    validation_split=0.2,
    subset="both",
    seed=1,  # the same on all workers
    verbose=False,
)
train, validation = train.take(args.steps).prefetch(2), validation.take(args.steps).prefetch(2)

with trainer.scope():
    model = resnet18()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

callbacks = [
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1),
    keras.callbacks.TensorBoard("logs/image_cnn"),
]
model.fit(train, validation_data=validation, epochs=args.epochs, callbacks=callbacks, verbose=2)
results = model.evaluate(validation, return_dict=True, verbose=0)
pathlib.Path("runs").mkdir(exist_ok=True)
trainer.save(model, "runs/image_cnn.keras")
if trainer.is_chief:
    print(f"validation accuracy {results['accuracy']:.4f}, {trainer.num_replicas} replicas")
