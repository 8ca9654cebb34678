"""Images: classification, segmentation, super-resolution, transfer, augmentation, video."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script

rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((22, 8, 8, 3)).astype(np.float32)
LABELS = rng.integers(0, 4, 22)
ONES = rng.integers(0, 2, (22, 8, 8, 1)).astype(np.float32)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


def run(model, *data, **arguments):
    return model.fit(*data, **{"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}).history


@script("Convolutional classifier: fit on arrays, evaluate, predict")
def classifier(scope):
    with scope():
        inputs = keras.Input((8, 8, 3))
        x = layers.MaxPooling2D()(layers.Conv2D(4, 3, activation="relu", padding="same")(inputs))
        outputs = layers.Dense(4, "softmax")(layers.Flatten()(x))
        model = keras.Model(inputs, outputs)
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = run(model, IMAGES, LABELS, validation_split=0.2)
    return history, model.evaluate(IMAGES, LABELS, verbose=0), model.predict(IMAGES, verbose=0)


@script("Image classifier with augmentation layers in the model", differs="random numbers: each replica draws its own")
def augmented(scope):
    with scope():
        model = keras.Sequential([keras.Input((8, 8, 3)), layers.RandomFlip(), layers.RandomRotation(0.1)])
        for layer in (layers.Conv2D(4, 3), layers.GlobalAveragePooling2D(), layers.Dropout(0.3), layers.Dense(4)):
            model.add(layer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return run(model, IMAGES, LABELS)


@script("Vision transformer: patches, attention, AdamW")
def vision_transformer(scope):
    with scope():
        inputs = keras.Input((8, 8, 3))
        x = layers.Reshape((16, 12))(keras.ops.image.extract_patches(inputs, 2))
        x = layers.Dense(8)(x) + layers.Embedding(16, 8)(keras.ops.arange(16))
        x = x + layers.MultiHeadAttention(2, 4)(*[layers.LayerNormalization()(x)] * 2)
        model = keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-3), loss)
    return run(model, IMAGES, LABELS)


@script("Segmentation: U-Net with a PyDataset, BatchNormalization off")
def segmentation(scope):
    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return IMAGES[index * 5 : index * 5 + 5], ONES[index * 5 : index * 5 + 5]

    with scope():
        inputs = keras.Input((8, 8, 3))
        down = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(down)
        model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(layers.Concatenate()([up, inputs])))
        model.compile(sgd(), "binary_crossentropy")
    history = run(model, Pairs(workers=1), batch_size=None, shuffle=True)
    return history, model.predict(Pairs(workers=1), verbose=0)


@script("Super-resolution: images of unknown size, predictions in a callback")
def super_resolution(scope):
    data = tf.data.Dataset.from_tensor_slices(IMAGES[..., :1])
    data = data.batch(6).map(lambda large: (tf.image.resize(large, (4, 4)), large))

    class Looks(keras.callbacks.Callback):
        found = ()

        def on_epoch_end(self, epoch, logs=None):
            self.found = (*self.found, self.model.predict(IMAGES[:1, :4, :4, :1], verbose=0))

    with scope():
        inputs = keras.Input((None, None, 1))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
        x = layers.Conv2D(4, 3, padding="same")(x)
        outputs = layers.Lambda(lambda x: tf.nn.depth_to_space(x, 2), output_shape=(None, None, 1))(x)
        model = keras.Model(inputs, outputs)
        model.compile(sgd(), "mse")
    looks = Looks()
    return model.fit(data, epochs=2, callbacks=[looks], verbose=0).history, looks.found


@script("Transfer learning: a frozen base, then thawed and compiled again")
def transfer(scope):
    with scope():
        base = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten()])
        base.trainable = False
        model = keras.Sequential([base, layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss)
    first = run(model, IMAGES, LABELS)
    base.trainable = True
    with scope():
        model.compile(keras.optimizers.SGD(0.01), loss)
    return first, run(model, IMAGES, LABELS), model.predict(IMAGES, verbose=0)


@script("Next frame of a video: ConvLSTM")
def next_frame(scope):
    frames = IMAGES[:20].reshape(5, 4, 8, 8, 3)[..., :1]
    with scope():
        x = inputs = keras.Input((None, 8, 8, 1))
        x = layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True)(x)
        model = keras.Model(inputs, layers.Conv3D(1, 3, padding="same")(x))
        model.compile(sgd(), "mse")
    return run(model, frames[:, :-1], frames[:, 1:], batch_size=3), model.predict(frames, verbose=0)


@script("MixUp: two shuffled datasets, zipped and mixed in map")
def mixup(scope):
    def shuffled(seed):
        return tf.data.Dataset.from_tensor_slices((IMAGES, tf.one_hot(LABELS, 4))).shuffle(22, seed=seed).batch(6)

    def mix(one, other):
        return tuple(0.7 * a + 0.3 * b for a, b in zip(one, other, strict=True))

    with scope():
        model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(4)])
        model.compile(sgd(), keras.losses.CategoricalCrossentropy(from_logits=True))
    return run(model, tf.data.Dataset.zip(shuffled(1), shuffled(2)).map(mix), batch_size=None)
