"""A vision transformer trains on two workers, of which the chief alone draws random numbers now and then."""

import keras
import numpy as np
from keras import layers, ops

from tests.cases.arms import WORKERS
from tests.cases.case import case

SIZE, PATCH, WIDTH = 16, 4, 16
rng = np.random.default_rng(0)
images = rng.integers(0, 256, (70, 20, 20, 3)).astype(np.uint8)
labels = rng.integers(0, 10, (70, 1))


class Patches(layers.Layer):
    def call(self, x):
        patches = ops.image.extract_patches(x, size=PATCH)
        return ops.reshape(patches, (-1, (SIZE // PATCH) ** 2, PATCH * PATCH * 3))


class Positions(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.embedding = layers.Dense(WIDTH), layers.Embedding((SIZE // PATCH) ** 2, WIDTH)

    def call(self, x):
        return self.dense(x) + self.embedding(ops.arange((SIZE // PATCH) ** 2)[None])


def transformer():
    """A vision transformer as users write it, with augmentation in the model."""
    augmentation = keras.Sequential(
        [
            layers.Normalization(),
            layers.Resizing(SIZE, SIZE),
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(0.02),
            layers.RandomZoom(0.2, 0.2),
        ]
    )
    augmentation.layers[0].adapt(images)
    inputs = keras.Input((20, 20, 3))
    x = Positions()(Patches()(augmentation(inputs)))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y), x])
        x = layers.Add()([layers.Dropout(0.1)(layers.Dense(WIDTH, "gelu")(layers.LayerNormalization()(x))), x])
    return keras.Model(inputs, layers.Dense(10)(layers.Dropout(0.5)(layers.Flatten()(x))))


@case(WORKERS, full=True)
def the_workers_stay_in_step(world):
    class ChiefDraws(keras.callbacks.Callback):
        """Looks at some examples, as the chief alone does that plots them."""

        def on_epoch_end(self, epoch, logs=None):
            if world.rank == 0:
                keras.random.uniform((2,))

    with world.scope():
        model = transformer()
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5)]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3, weight_decay=1e-4), loss, metrics=metrics)
    best = keras.callbacks.ModelCheckpoint(
        world.folder / "best.weights.h5", monitor="val_accuracy", save_best_only=True, save_weights_only=True
    )
    how = {"batch_size": 16, "epochs": 2, "validation_split": 0.2, "verbose": 0}
    history = model.fit(images, labels, callbacks=[best, ChiefDraws()], **how).history
    model.load_weights(best.filepath)
    if world.rank == 0:
        keras.random.uniform((2,))
    evaluated = model.evaluate(images, labels, verbose=0, return_dict=True)
    predicted = model.predict(images, verbose=0)
    scores = predicted[np.arange(70), labels[:, 0]]
    chief, worker = world.gather((history, evaluated, predicted.tobytes()))
    return {
        "same bits": (chief == worker, True),
        "epochs": (len(history["val_accuracy"]), 2),
        "loss": (evaluated["loss"], np.mean(np.log(np.exp(predicted).sum(1)) - scores)),
    }
