"""Texts and sequences: vectorisation, recurrent networks, attention, CTC."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import run, sgd

rng = np.random.default_rng(1)
WORDS = np.array(["the", "cat", "sat", "on", "a", "mat", "dog", "ran"])
TEXTS = np.array([" ".join(rng.choice(WORDS, 6)) for _ in range(22)])
CLASSES = rng.integers(0, 2, 22).astype(np.float32)
TOKENS = rng.integers(1, 9, (22, 7))


@script("Text classification: TextVectorization in the dataset")
def vectorised_before(scope):
    vectorise = layers.TextVectorization(max_tokens=12, output_sequence_length=7)
    vectorise.adapt(TEXTS)
    data = tf.data.Dataset.from_tensor_slices((TEXTS, CLASSES)).batch(6).map(lambda x, y: (vectorise(x), y))
    with scope():
        model = keras.Sequential([layers.Embedding(12, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)])
        model.compile(sgd(), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model.fit(data, validation_data=data, epochs=2, verbose=0).history


@script("Text classification: TextVectorization in the model, which is given texts")
def vectorised_within(scope):
    with scope():
        vectorise = layers.TextVectorization(max_tokens=12, output_sequence_length=7)
        vectorise.adapt(TEXTS)
        model = keras.Sequential([keras.Input((1,), dtype="string"), vectorise, layers.Embedding(12, 4)])
        model.add(layers.GlobalAveragePooling1D())
        model.add(layers.Dense(1))
        model.compile(sgd(), keras.losses.BinaryCrossentropy(from_logits=True))
    return model.fit(
        tf.data.Dataset.from_tensor_slices((TEXTS[:, None], CLASSES)).batch(6), epochs=2, verbose=0
    ).history


@script("Recurrent network with masking and bidirectional LSTM")
def recurrent(scope):
    padded = np.where(np.arange(7) < np.random.default_rng(6).integers(2, 8, (22, 1)), TOKENS, 0)
    with scope():
        model = keras.Sequential([keras.Input((7,)), layers.Embedding(10, 4, mask_zero=True)])
        model.add(layers.Bidirectional(layers.LSTM(3)))
        model.add(layers.Dense(1, "sigmoid"))
        model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    return run(model, padded, CLASSES), model.evaluate(padded, CLASSES, verbose=0)


@script("Sequence to sequence: LSTM encoder and decoder, decoded step by step")
def sequence_to_sequence(scope):
    one_hot = np.eye(9, dtype=np.float32)[TOKENS]
    with scope():
        source, target = keras.Input((None, 9)), keras.Input((None, 9))
        _, *states = layers.LSTM(5, return_state=True)(source)
        decoder = layers.LSTM(5, return_sequences=True, return_state=True)
        decoded, *_ = decoder(target, initial_state=states)
        model = keras.Model([source, target], layers.Dense(9, "softmax")(decoded))
        model.compile(sgd(), "categorical_crossentropy")
        encoder = keras.Model(source, states)
    history = run(model, [one_hot, one_hot[:, :-1]], one_hot[:, 1:])
    return history, encoder.predict(one_hot[:1], verbose=0)


@script("Transformer: layers and blocks of your own, positions, causal attention")
def transformer(scope):
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = layers.MultiHeadAttention(2, 4)
            self.norm, self.dense = layers.LayerNormalization(), layers.Dense(8, "relu")

        def call(self, x):
            return self.dense(self.norm(x + self.attention(x, x, use_causal_mask=True)))

    with scope():
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(10, 8)(inputs) + layers.Embedding(6, 8)(keras.ops.arange(6))
        model = keras.Model(inputs, layers.Dense(10)(Block()(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss)
    return run(model, TOKENS[:, :-1], TOKENS[:, 1:])


@script("Masked language model: own compute_loss with weights of tokens")
def masked_language(scope):
    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed, self.out = layers.Embedding(10, 6), layers.Dense(10)

        def call(self, x):
            return self.out(self.embed(x))

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            return loss(y, y_pred, sample_weight)

    hidden = np.where(np.random.default_rng(7).random(TOKENS.shape) < 0.3, 9, TOKENS)
    weights = np.ones(TOKENS.shape, np.float32)
    with scope():
        model = Masked()
        model.compile(sgd())
    return run(model, hidden, TOKENS, sample_weight=weights)


@script("Text recognition: CTC by a layer's add_loss, and a second model to predict")
def connectionist(scope):
    class Loss(layers.Layer):
        def call(self, labels, found):
            size = tf.shape(labels)[0]
            lengths = tf.fill([size], tf.shape(found)[1]), tf.fill([size], tf.shape(labels)[1])
            self.add_loss(keras.ops.mean(keras.ops.ctc_loss(labels, found, lengths[1], lengths[0], mask_index=0)))
            return found

    x = np.random.default_rng(8).standard_normal((22, 12, 3)).astype(np.float32)
    with scope():
        inputs, labels = keras.Input((12, 3), name="image"), keras.Input((3,), dtype="int32", name="label")
        found = layers.Dense(10, name="found")(layers.Conv1D(4, 3, padding="same")(inputs))
        model = keras.Model([inputs, labels], Loss()(labels, found))
        model.compile(sgd())
        reader = keras.Model(inputs, found)
    given = {"image": x, "label": TOKENS[:, :3].astype(np.int32)}
    return run(model, given, epochs=1, batch_size=11), reader.predict(x, verbose=0)
