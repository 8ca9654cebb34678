"""Trains with split slots, and continues from backups and saved models in the same and in other ways. Arguments: strategy, output
folder, `resumed` or `saved`, the number of ways in which trainings before a break are run, and optimizers.

Stores for each case, if `resumed`, by the ways of the trainings before and after the break, what `train` returns; if `saved`, the hashes
of what plain Keras loads from a saved model and trains with it, and how a saved model continues in both ways.
"""

import contextlib
import hashlib
import os
import shutil
import sys

from tests.helpers.options import set_options
from tests.multiprocess import harness
from tests.multiprocess.sharded_program import BATCH, IDS, OPTIMIZERS, Scale, X, Y, build, bytes_of, out, trainer

import tfdist  # isort: skip

import keras  # isort: skip

BREAK = 8  # the second step of the second epoch
WAYS = ("sharded", "whole")


class BreakError(Exception):
    """Ends a training."""


class Break(keras.callbacks.Callback):
    only_observes = True  # else each step would average the replicas' statistics, which the undisturbed run does not
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == BREAK:
            raise BreakError


def use(way):
    set_options(trainer.strategy, shard_optimizer=way == "sharded")
    keras.backend.clear_session()  # a new process would have the same names of variables
    keras.utils.set_random_seed(1)


def fit(way, optimizer, folder="", callbacks=()):
    """Trains a new model, with backups in a folder; returns the model and its losses."""
    use(way)
    with trainer.scope():
        model = build()
        model.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = list(callbacks)
    if folder:
        callbacks.append(tfdist.BackupAndRestore(folder, save_freq=BREAK - 1, delete_checkpoint=False))
    history = trainer.fit(model, [IDS, X], Y, batch_size=BATCH, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return model, history.history["loss"]


def digest(values):
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def trained(model):
    """Returns the hash of the weights."""
    return digest([weight.numpy() for weight in model.weights])


def loaded(path):
    """Returns the hash of the optimizer that plain Keras loads, and of the weights after one more step."""
    model = keras.models.load_model(path, {"Scale": Scale})
    state = [variable.numpy() for variable in model.optimizer.variables]
    model.train_on_batch([IDS, X], Y)
    return len(state), digest(state), trained(model)


def continued(way, path):
    """Returns the hash of the weights, and the losses, after a further epoch of a saved model; and the bytes of the optimizer's state."""
    use(way)
    with trainer.scope():
        model = keras.models.load_model(path, {"Scale": Scale})
    history = trainer.fit(model, [IDS, X], Y, batch_size=BATCH, verbose=0, shuffle=False)
    return (trained(model), history.history["loss"]), bytes_of(model.optimizer)


def resumed(optimizer, firsts):
    """Breaks trainings of the ways `firsts`, and continues each in both ways."""
    model, losses = fit("whole", optimizer)
    results = {"whole": (trained(model), losses)}
    for first in firsts:
        broken = os.path.join(out, f"{optimizer}-{first}")
        with contextlib.suppress(BreakError):
            fit(first, optimizer, broken, [Break()])
        for then in WAYS:
            folder = f"{broken}-{then}"
            if trainer.is_chief:
                shutil.copytree(broken, folder, dirs_exist_ok=True)
            model, losses = fit(then, optimizer, folder)
            results[first, then] = trained(model), losses
    return results


def saved(optimizer, _):
    """Saves models of both ways, and continues the second one in both ways."""
    results = {"loaded": {}, "continued": {}, "kept": {}}
    for way in WAYS:
        model, _ = fit(way, optimizer)
        path = os.path.join(out, f"{optimizer}-{way}.keras")
        if trainer.cluster:
            trainer.save(model, path)
        else:
            model.save(path)  # one process has all slots
        results["loaded"][way] = loaded(path)
    for way in WAYS:
        results["continued"][way], results["kept"][way] = continued(way, path)
    return results


if __name__ == "__main__":
    part, number, *chosen = sys.argv[3:]
    found = {optimizer: globals()[part](optimizer, WAYS[: int(number)]) for optimizer in chosen}
    harness.store(out, trainer.task.index, found)
