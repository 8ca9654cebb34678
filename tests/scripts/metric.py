"""Learning by comparison: Siamese networks, contrastive losses, metric learning."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import LABELS, run, sgd

rng = np.random.default_rng(2)
X = rng.standard_normal((22, 6)).astype(np.float32)
_WITHIN = "compares the examples of a batch with each other, and each replica has only its share of the batch"


@script("Siamese network: three inputs, a distance layer, own train_step and test_step")
def siamese(scope):
    class Distance(layers.Layer):
        def call(self, anchor, positive, negative):
            return keras.ops.sum((anchor - positive) ** 2, -1), keras.ops.sum((anchor - negative) ** 2, -1)

    class Siamese(keras.Model):
        def __init__(self, network):
            super().__init__()
            self.network, self.tracker = network, keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.network(inputs)

        def loss_of(self, data):
            near, far = self.network(data)
            return keras.ops.mean(keras.ops.maximum(near - far + 0.5, 0.0))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            grads = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.network.trainable_weights, strict=True))
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

        def test_step(self, data):
            self.tracker.update_state(self.loss_of(data))
            return {"loss": self.tracker.result()}

        @property
        def metrics(self):
            return [self.tracker]

    data = tf.data.Dataset.from_tensor_slices((X, X[::-1], np.roll(X, 3, 0))).map(lambda *x: x).batch(6)
    with scope():
        embed = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh")])
        inputs = [keras.Input((6,)) for _ in range(3)]
        model = Siamese(keras.Model(inputs, Distance()(*map(embed, inputs))))
        model.compile(optimizer=sgd())
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    return history, embed(X).numpy()


@script("Supervised contrastive learning: a loss of your own over a batch's pairs, then a classifier")
def contrastive(scope):
    class Contrastive(keras.losses.Loss):
        def call(self, labels, vectors):
            vectors = tf.math.l2_normalize(vectors, 1)
            same = tf.cast(tf.equal(labels[:, None], labels[None]), tf.float32)
            return -tf.reduce_sum(same * tf.nn.log_softmax(vectors @ tf.transpose(vectors)), 1)

    with scope():
        encoder = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        encoder.compile(sgd(), Contrastive())
    first = run(encoder, X, LABELS)
    with scope():
        encoder.trainable = False
        model = keras.Sequential([encoder, layers.Dense(4, "softmax")])
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return first, run(model, X, LABELS)


@script("Metric learning: pairs from a PyDataset, train_step by compute_loss", differs=_WITHIN)
def pairs(scope):
    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.stack([X[index * 4 : index * 4 + 4], X[index * 4 + 4 : index * 4 + 8]], 1)

    class Metric(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Dense(4)

        def call(self, x):
            return self.embed(x)

        def train_step(self, data):
            if isinstance(data, tuple):
                data = data[0]
            with tf.GradientTape() as tape:
                near = tf.einsum("ae,pe->ap", self(data[:, 0], training=True), self(data[:, 1], training=True))
                loss = self.compute_loss(y=tf.range(tf.shape(near)[0]), y_pred=near)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else None
            return {m.name: m.result() for m in self.metrics}

    with scope():
        model = Metric()
        model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model.fit(Pairs(workers=1), epochs=2, verbose=0).history


@script("Noise contrastive pairs: two towers, a loss layer with targets as inputs")
def endpoint(scope):
    class Endpoint(layers.Layer):
        def __init__(self):
            super().__init__()
            self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

        def call(self, targets, logits):
            self.add_loss(self.loss_of(targets, logits))
            return keras.ops.sigmoid(logits)

    with scope():
        inputs, targets = keras.Input((6,), name="inputs"), keras.Input((1,), name="targets")
        outputs = Endpoint()(targets, layers.Dense(1)(inputs))
        model = keras.Model({"inputs": inputs, "targets": targets}, outputs)
        model.compile(sgd())
    given = {"inputs": X, "targets": (X[:, :1] > 0).astype(np.float32)}
    return run(model, given), model.predict(given, verbose=0)
