"""A GAN in a training loop of your own: two networks, two optimizers, GradientTape, and a critic's gradient penalty.

    python examples/gan_custom_loop.py                                # one process
    tfdist launch --workers=2 -- python examples/gan_custom_loop.py   # two processes
    tfdist launch --workers=1 --ps=1 -- python examples/gan_custom_loop.py --strategy=parameter_server

It learns points on a circle, which lie around eight places. Takes about 30 s on 2 cores; expect an error below 0.2: the mean
distance of made points from the nearest place, where 0.05 is that of real points and 1 that of the untrained network's.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfdist

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="multi_worker_mirrored")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--steps", type=int, default=100, help="steps per epoch")
args = parser.parse_args()

trainer = tfdist.Trainer(args.strategy, backup_dir="runs/gan_backup")  # before any tensor; an interrupted run goes on
keras.utils.set_random_seed(1)
angles = np.arange(8) * np.pi / 4
places = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
rng = np.random.default_rng(1)
points = places[rng.integers(8, size=20000)] + rng.normal(0, 0.04, (20000, 2)).astype(np.float32)
data = tf.data.Dataset.from_tensor_slices(points).shuffle(20000, seed=1).repeat().batch(128).prefetch(tf.data.AUTOTUNE)


def network(inputs, outputs):
    hidden = [keras.layers.Dense(64, "leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


with trainer.scope():
    generator, critic = network(8, 2), network(2, 1)
    generator_optimizer, critic_optimizer = (keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.99) for _ in range(2))
    seeds = keras.random.SeedGenerator(1)  # each replica draws numbers of its own


def train(real):
    """One step on a replica's part of a batch: losses are means over it."""
    made = generator(keras.random.normal((tf.shape(real)[0], 8), seed=seeds))
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(real)
            judged = critic(real)
        penalty = tf.reduce_mean(tf.reduce_sum(tf.square(inner.gradient(judged, real)), axis=1))
        critic_loss = tf.reduce_mean(tf.nn.softplus(-judged) + tf.nn.softplus(critic(made))) + penalty / 20
    gradients = tape.gradient(critic_loss, critic.trainable_variables)
    critic_optimizer.apply(gradients, critic.trainable_variables)
    with tf.GradientTape() as tape:
        made = generator(keras.random.normal((tf.shape(real)[0], 8), seed=seeds))
        generator_loss = tf.reduce_mean(tf.nn.softplus(-critic(made)))
    gradients = tape.gradient(generator_loss, generator.trainable_variables)
    generator_optimizer.apply(gradients, generator.trainable_variables)
    return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def error():
    noise = np.random.default_rng(2).standard_normal((2000, 8)).astype(np.float32)
    distances = np.linalg.norm(generator.predict(noise, verbose=0)[:, None] - places, axis=2)
    return distances.min(axis=1).mean(), len(np.unique(distances.argmin(axis=1)))


step = trainer.step(train, uses=[generator, critic, generator_optimizer, critic_optimizer, seeds])
logs = []
for number, real in enumerate(step.loop(data, epochs=args.epochs, steps_per_epoch=args.steps), 1):
    logs.append(step(real))
    if number % (5 * args.steps) == 0 and trainer.is_chief:
        means = {name: np.mean([each[name] for each in logs[-args.steps :]]) for name in logs[-1]}
        print(f"step {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
found, reached = error()
trainer.save(generator, "runs/gan_custom_loop.keras")
if trainer.is_chief:
    print(f"error {found:.3f}; {reached} of 8 places reached")
