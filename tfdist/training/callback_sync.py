"""Synchronization of the ranks of a run around the user's callbacks.

If one rank leaves the loop or enters a collective alone, the others hang; if it changes the learning rate or weights alone, the
replicas diverge. A callback that only one rank has (`if chief: callbacks.append(...)`) can cause all of these. Therefore statistics are
synchronized before callbacks run, and afterwards all ranks agree on the callbacks' decisions. Any rank may stop the training, the
chief's learning rate applies, and after an epoch all weights must be equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Logs, Variables
from tfdist.collectives import hardware
from tfdist.collectives.ranks import Ranks
from tfdist.compat import optimizer_search
from tfdist.errors import ClusterError
from tfdist.gradients import local_steps
from tfdist.layers.table import common
from tfdist.replicas import equal_weights
from tfdist.runtime.report.phase import phase
from tfdist.strategy import Strategy
from tfdist.training.alike import Alike
from tfdist.training.callback_kinds import only_logs, only_observes, only_writes

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def wrap_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    strategy: Strategy,
    ranks: Ranks,
    check_weights: bool,
    in_parts: bool = False,
) -> tuple[keras.callbacks.Callback, list[keras.callbacks.Callback], keras.callbacks.Callback]:
    """Returns the callback to call first, this rank's callbacks, and the callback to call last. A collective.

    With `check_weights` the ranks compare their weights after each epoch. Ranks whose callbacks differ always do. If the model's state is
    `in_parts`, all ranks run the callbacks that may write it.
    """
    local = [c for c in callbacks if ranks.is_chief or not only_writes(c) or (in_parts and not only_logs(c))]
    # Writers count, although workers drop them: on the chief they read the model. Observers do not count.
    names = ",".join(type(c).__qualname__ for c in callbacks if not only_observes(c)).encode()
    with phase("call", "the comparison of its callbacks"):
        gathered = ranks.gather(float(any(map(acts_on_batches, callbacks))), float(zlib.crc32(names)))
    on_batches = bool(gathered[:, 0].any())
    alike = len(set(gathered[:, 1])) == 1
    agree = _CheckConsistency(strategy, ranks, on_batches, alike, check_weights)
    return _Synchronize(strategy, on_batches), local, agree


def differ(callbacks: Sequence[keras.callbacks.Callback], ranks: Ranks) -> bool:
    """Returns whether the ranks have different callbacks, other than those that only log. A collective."""
    names = ",".join(type(callback).__qualname__ for callback in callbacks if not only_logs(callback)).encode()
    return len(set(ranks.gather(float(zlib.crc32(names)))[:, 0])) > 1


def acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback may read the model, stop or change something at a training step."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_freq != "epoch"
    if only_observes(callback):
        return False
    # LambdaCallback sets its hooks on the instance.
    return any(
        hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
        for hook in _BATCH_HOOKS
    )


class _Synchronize(keras.callbacks.Callback):
    """The first callback: synchronizes statistics across ranks, so that a later callback may read the model on one rank alone.

    To average them at each step (`on_batches`) changes their last bits, and those of gradient accumulators.
    """

    def __init__(self, strategy: Strategy, on_batches: bool):
        super().__init__()
        self._strategy = strategy
        self._on_batches = on_batches

    def _synchronize(self, *_: Any, **__: Any) -> None:
        self._strategy.statistics.synchronize()

    on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _synchronize

    def on_train_begin(self, logs: Logs = None) -> None:
        for local in local_steps.of_model(self.model):
            local.begin()
        self._synchronize()

    def on_train_end(self, logs: Logs = None) -> None:
        for local in local_steps.of_model(self.model):
            local.end()
        self._synchronize()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._on_batches:
            self._strategy.statistics.synchronize()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._strategy.statistics.desynchronize()
        if self._on_batches:
            self._strategy.statistics.synchronize()


class _CheckConsistency(keras.callbacks.Callback):
    """The last callback: applies one rank's decisions on all ranks.

    `on_batches`: some rank has a callback that acts on batches. `alike`: all ranks have the same callbacks, except those that only
    observe. Unequal weights are an error if `alike`; otherwise all ranks take the chief's weights.
    """

    def __init__(self, strategy: Strategy, ranks: Ranks, on_batches: bool, alike: bool, check_weights: bool):
        super().__init__()
        self._strategy = strategy
        self._ranks = ranks
        self._on_batches = on_batches
        self._alike = alike
        self._check_weights = check_weights

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._on_batches and not self._alike:
            self._agree()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._on_batches:
            self._agree()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._agree()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._agree()
        if self._check_weights or not self._alike:
            self._weights_are_equal(f"after epoch {epoch + 1}")
        else:
            equal_weights.check_equal_on_replicas(self._strategy, self.model.weights, by_optimizer=False)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._agree()
        self._weights_are_equal("before the training")

    def on_train_end(self, logs: Logs = None) -> None:
        self._weights_are_equal("at the end of the training")

    def _agree(self) -> None:
        if self._ranks.size == 1:
            return
        optimizer = self.model.optimizer
        # LossScaleOptimizer does not use its own learning rate.
        rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None)
        # A schedule is a function of the step: equal on all ranks.
        local_rate = 0.0
        if isinstance(rate, keras.Variable):
            local_rate = float(rate.numpy())
        gathered = self._ranks.gather(float(self.model.stop_training), local_rate)
        # Any rank may stop all; the chief's learning rate applies.
        self.model.stop_training = bool(gathered[:, 0].any())
        if (gathered[:, 1] != gathered[0, 1]).any():
            optimizer.learning_rate = float(gathered[0, 1])

    def _weights_are_equal(self, when: str) -> None:
        equal_weights.check_equal_on_replicas(self._strategy, self.model.weights)
        if self._ranks.size == 1:
            return
        optimizers = optimizer_search.optimizers(self.model)
        held = [*self.model.weights]
        if not self._strategy.trains_alone:
            held += getattr(self.model.optimizer, "variables", [])
        variables = common(held, optimizers)
        remedy = f"They were compared {when}. Does something set weights from values that differ between tasks?"
        if self._strategy.trains_alone:
            remedy += " With sync_every a layer may assign only weights that it adds by add_weight(trainable=False)."
        hardware_difference = hardware.describe_difference(self._strategy)
        if hardware_difference:
            remedy += f" The tasks also differ in {hardware_difference}, which changes the rounding of sums."
        alike = Alike(self._ranks)
        for variable in variables:
            name = getattr(variable, "path", variable.name)
            alike.add(f"The variable {name}", f"checksum {fingerprint([variable]):08x}", remedy)
        if self._alike:
            alike.check(ClusterError)
        elif alike.difference():
            for variable in variables:
                variable.assign(self._ranks.broadcast(tf.convert_to_tensor(variable.value)))


def fingerprint(variables: Variables) -> int:
    """Returns a checksum of the variables' bits, 32 bits long."""
    checksum = 0
    for variable in variables:
        checksum = zlib.crc32(np.ascontiguousarray(variable.numpy()).data.cast("B"), checksum)
    return checksum
