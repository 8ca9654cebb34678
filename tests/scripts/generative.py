"""Generative models: those whose random numbers differ between replicas, as they must; see tests/cases/sources/model_methods.py for those without any."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import IMAGES, run, sgd

FLAT = IMAGES.reshape(22, -1)[:20, :12]
_DRAWS = "random numbers: each replica draws its own"


@script("Autoencoder: its own input is its target")
def autoencoder(scope):
    with scope():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(3, "tanh"), layers.Dense(12)])
        model.compile(sgd(), "mse")
    return run(model, FLAT, FLAT), model.predict(FLAT, verbose=0)


@script("Variational autoencoder: Sampling layer, own train_step, no call", differs=_DRAWS)
def variational(scope):
    class Sampling(layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.seed = keras.random.SeedGenerator(1)

        def call(self, inputs):
            mean, log = inputs
            return mean + keras.ops.exp(0.5 * log) * keras.random.normal(keras.ops.shape(mean), seed=self.seed)

    class Variational(keras.Model):
        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder, self.decoder = encoder, decoder
            self.total = keras.metrics.Mean(name="total")

        @property
        def metrics(self):
            return [self.total]

        def train_step(self, data):
            with tf.GradientTape() as tape:
                mean, log, drawn = self.encoder(data)
                rebuilt = keras.ops.mean(keras.ops.sum((data - self.decoder(drawn)) ** 2, -1))
                loss = rebuilt - 0.5 * keras.ops.mean(1 + log - mean**2 - keras.ops.exp(log))
            grads = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total.update_state(loss)
            return {"total": self.total.result()}

    with scope():
        inputs = keras.Input((12,))
        mean, log = layers.Dense(2)(inputs), layers.Dense(2)(inputs)
        encoder = keras.Model(inputs, [mean, log, Sampling()([mean, log])])
        decoder = keras.Sequential([keras.Input((2,)), layers.Dense(12)])
        model = Variational(encoder, decoder)
        model.compile(optimizer=keras.optimizers.Adam())
    return run(model, FLAT)


@script("DCGAN: two optimizers given to compile, noise in train_step", differs=_DRAWS)
def adversarial(scope):
    class Adversarial(keras.Model):
        def __init__(self, critic, generator):
            super().__init__()
            self.critic, self.generator = critic, generator
            self.seed = keras.random.SeedGenerator(3)
            self.judged = keras.metrics.Mean(name="judged")

        def compile(self, critic_optimizer, generator_optimizer, loss):
            super().compile()
            self.critic_optimizer, self.generator_optimizer, self.loss_of = critic_optimizer, generator_optimizer, loss

        @property
        def metrics(self):
            return [self.judged]

        def train_step(self, real):
            size = tf.shape(real)[0]
            made = self.generator(keras.random.normal((size, 4), seed=self.seed))
            labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
            with tf.GradientTape() as tape:
                loss = self.loss_of(labels, self.critic(tf.concat([made, real], 0)))
            weights = self.critic.trainable_weights
            self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                judged = self.critic(self.generator(tf.random.normal((size, 4))))
                fooled = self.loss_of(tf.zeros((size, 1)), judged)
            weights = self.generator.trainable_weights
            self.generator_optimizer.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
            self.judged.update_state(loss)
            return {"judged": self.judged.result()}

    with scope():
        critic = keras.Sequential([keras.Input((12,)), layers.Dense(6), layers.LeakyReLU(), layers.Dense(1)])
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(12)])
        model = Adversarial(critic, generator)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), keras.optimizers.Adam(), loss)
    return model.fit(FLAT, batch_size=6, epochs=2, verbose=0).history


@script("WGAN-GP: two optimizers, no call, nested tapes for the gradient penalty, noise from the data")
def gradient_penalty(scope):
    class Wasserstein(keras.Model):
        def __init__(self, critic, generator):
            super().__init__()
            self.critic, self.generator = critic, generator

        def compile(self, critic_optimizer, generator_optimizer):
            super().compile()
            self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

        def penalty(self, real, made, mix):
            with tf.GradientTape() as tape:
                mixed = mix * real + (1 - mix) * made
                tape.watch(mixed)
                judged = self.critic(mixed)
            length = tf.sqrt(tf.reduce_sum(tape.gradient(judged, mixed) ** 2, 1) + 1e-12)
            return tf.reduce_mean((length - 1) ** 2)

        def train_step(self, data):
            real, noise, mix = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    made = self.generator(noise)
                    cost = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(real))
                    cost += 10.0 * self.penalty(real, made, mix)
                weights = self.critic.trainable_weights
                self.critic_optimizer.apply_gradients(zip(tape.gradient(cost, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(self.critic(self.generator(noise)))
            weights = self.generator.trainable_weights
            self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"cost": cost, "loss": loss}

    with scope():
        critic = keras.Sequential([keras.Input((12,)), layers.Dense(6, "tanh"), layers.Dense(1)])
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(12)])
        model = Wasserstein(critic, generator)
        model.compile(keras.optimizers.SGD(0.02), keras.optimizers.SGD(0.02))
    rng = np.random.default_rng(7)
    noise, mix = rng.standard_normal((20, 4)).astype(np.float32), rng.uniform(size=(20, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((FLAT, noise, mix)).batch(10)
    model.fit(data, epochs=2, verbose=0)
    return critic.get_weights(), generator.get_weights()


@script("Diffusion: noise and times in train_step, a network of averaged weights", differs=_DRAWS)
def diffusion(scope):
    class Diffusion(keras.Model):
        def __init__(self, network):
            super().__init__()
            self.network, self.averaged = network, keras.models.clone_model(network)
            self.normalise = layers.Normalization()

        def train_step(self, images):
            images = self.normalise(images, training=True)
            noise = keras.random.normal(tf.shape(images))
            times = keras.random.uniform((tf.shape(images)[0], 1))
            with tf.GradientTape() as tape:
                found = self.network(times * images + (1 - times) * noise, training=True)
                loss = self.loss(noise, found)
            grads = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.network.trainable_weights, strict=True))
            for weight, average in zip(self.network.weights, self.averaged.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return {"noise": loss}

    with scope():
        model = Diffusion(keras.Sequential([keras.Input((12,)), layers.Dense(8, "relu"), layers.Dense(12)]))
        model.normalise.adapt(FLAT)
        model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=keras.losses.MeanAbsoluteError())
    history = model.fit(FLAT, batch_size=6, epochs=2, verbose=0).history
    return history, np.mean(model.averaged.get_weights()[0])
