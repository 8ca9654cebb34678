"""Replaces methods of `keras.Model`, as libraries that log each training do. Arguments: strategy, output folder, "before" or "after" the Trainer, "mlflow" or "own"."""

import os
import sys

import keras
import numpy as np

import tfdist
from tests.multiprocess import harness

name, out, when, library = sys.argv[1:5]
os.chdir(os.path.dirname(out))  # mlflow writes to the working directory
called = []
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # its thread and its import hook wait for each other


def replace(method):
    original = getattr(keras.Model, method)

    def replacement(self, *args, **kwargs):
        called.append(method)
        return original(self, *args, **kwargs)

    setattr(keras.Model, method, replacement)


def log_all():
    if library == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{out}-{os.getpid()}.db")
        mlflow.autolog(log_models=False, log_datasets=False, silent=True)
    for method in ("fit", "evaluate", "predict"):
        replace(method)


if when == "before":
    log_all()
trainer = tfdist.Trainer(name, **({"devices": 2} if name == "mirrored" else {}))
if when == "after":
    log_all()
X = np.arange(6, dtype="float32")[:, np.newaxis]
with trainer.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")

histories = [model.fit(X, 0 * X, verbose=0), trainer.fit(model, X, 0 * X, verbose=0)]
evaluated = model.evaluate(X, 0 * X, verbose=0)
predicted = model.predict(X, batch_size=3, verbose=0)
tfdist.Trainer(trainer.strategy)  # replaces nothing again
histories.append(model.fit(X, 0 * X, verbose=0))
runs = []
if library == "mlflow":
    import mlflow

    runs = mlflow.search_runs(search_all_experiments=True)["metrics.loss"].tolist()
losses = [history.history["loss"][0] for history in histories]
results = {"losses": losses, "evaluated": evaluated, "predicted": predicted, "called": called, "runs": runs}
harness.store(out, trainer.task.index, results)
