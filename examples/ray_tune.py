"""Searches a learning rate with Ray Tune: each trial is a training of two workers on a Ray cluster.

    pip install 'tfdist[ray]' 'ray[tune]'
    python examples/ray_tune.py

Without a cluster in RAY_ADDRESS it starts Ray on this machine. Each worker takes 0.4 CPUs, so that two trials run at a time on two cores.
Takes about a minute; expect a best loss below 0.1.
"""

import functools

import tfdist


def train(learning_rate):
    """Runs on each worker of a trial; returns the loss of the last epoch."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).uniform(-1, 1, (512, 2))
    y = x.sum(axis=1, keepdims=True)
    trainer = tfdist.Trainer("multi_worker_mirrored")
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(learning_rate), "mse")
    history = model.fit(x, y, batch_size=64, epochs=5, verbose=0)
    return history.history["loss"][-1]


def trial(config):
    """Runs where Tune has started it; its workers have places of their own, for which it waits while other trials run."""
    from ray import tune

    loss = tfdist.ray.run(functools.partial(train, **config), workers=2, cpus_per_worker=0.4, join_seconds=600)
    tune.report({"loss": loss})


def main():
    """Runs four trials, and prints the best one."""
    from ray import tune

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),
        param_space={"learning_rate": tune.grid_search([0.001, 0.01, 0.1, 0.3])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
    )
    best = tuner.fit().get_best_result()
    print(f"best learning rate {best.config['learning_rate']}: loss {best.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
