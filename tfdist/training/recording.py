"""The records of the updates of a training, for `tfdist verify`: a line of JSON for each update, on each rank.

The variables are read between the updates; only the examples and the gradient are taken within a step.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import platform
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Gradient, Logs, Structure
from tfdist.compat import keras_internals, keras_loops, optimizer_search, tf_cluster
from tfdist.engine import Engine
from tfdist.feature import Feature, RunningStep
from tfdist.gradients import optimizer as optimizer_lib
from tfdist.replicas import batch_splitting
from tfdist.runtime.report import progress
from tfdist.strategy import Strategy
from tfdist.verify import settings as verify_settings
from tfdist.verify.settings import Settings
from tfdist.version import __version__

SKETCHES = 4  # sums of a value with random signs: the norm of the difference of two values is estimated from them
_MASK = 2**64 - 1
_BACKUP_SECONDS = 60.0  # the longest wait for a complete backup before a task kills itself
_fits = 0  # of this process
_done_before = 0  # updates of the finished fits of this process
_gradients: dict[int, list[tf.Variable]] = {}  # those of the last update, by the id of the optimizer


def prepare(model: keras.Model) -> None:
    """Prepares a model's steps for a `Recorder`, before they are traced."""
    if verify_settings.current() is None:
        return
    if int(model.steps_per_execution) != 1:
        model.steps_per_execution = 1
        model.train_function = None
    strategy = model.distribute_strategy
    if strategy.batch_record is None:
        strategy.batch_record = BatchRecord(strategy)
        strategy.features = (*strategy.features, strategy.batch_record)
    if strategy.traits.asynchronous:
        return  # workers trace the step, and have no variables of the chief
    for optimizer in optimizer_search.optimizers(model):
        leaf = getattr(optimizer, "inner_optimizer", optimizer)
        if id(leaf) not in _gradients:
            _gradients[id(leaf)] = []
            keras_internals.before_variable_update(leaf, functools.partial(_keep, _gradients[id(leaf)]))


def _keep(kept: list[tf.Variable], grads: list[Gradient]) -> None:
    """Assigns gradients to variables, which are created for the first ones. XLA, which may compile this, calls no Python."""
    dense = [tf.convert_to_tensor(grad) for grad in grads if grad is not None]
    if len(kept) != len(dense):
        with tf.init_scope(), tf.device("CPU:0"):
            kept[:] = map(_variable_for, dense)
    for variable, grad in zip(kept, dense, strict=True):
        variable.assign(grad)


def _variable_for(grad: tf.Tensor) -> tf.Variable:
    if grad.shape.is_fully_defined():
        return tf_cluster.ResourceVariable(tf.zeros(grad.shape, grad.dtype), trainable=False)
    empty = tf.zeros([0], grad.dtype)  # the gradient of a lookup has an unknown number of rows
    return tf_cluster.ResourceVariable(empty, trainable=False, shape=tf.TensorShape(None))


def recorder(model: keras.Model, done: int) -> Recorder | None:
    """Returns the recorder of a training that begins after `done` updates; None outside of `tfdist verify`."""
    settings = verify_settings.current()
    return Recorder(settings, model, done) if settings else None


class BatchRecord(Feature):
    """The examples of the updates since the last `take`, of this process: their number, and the sum of their checksums modulo 2^64."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        self._count = 0
        self._sum = 0

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        if step.trains:
            self.add(step.data)
        run()

    def add(self, data: Structure) -> None:
        """Adds a batch, whose values have a part for each replica, also within a graph."""
        counts = None
        if isinstance(data, batch_splitting.SplitBatch):
            data, counts = data
        local = self.strategy.experimental_local_results
        for replica in range(len(local(tf.nest.flatten(data)[0]))):
            leaves = [local(value)[replica] for value in tf.nest.flatten(batch_splitting.without_optionals(data))]
            count = -1 if counts is None else local(counts)[replica][0, 0]
            tensors = [_dense(leaf) for leaf in leaves if leaf is not None]
            tf.numpy_function(self._add, [count, *tensors], [], stateful=True)

    def _add(self, count: int, *leaves: np.ndarray) -> None:
        if count < 0:
            count = max((len(leaf) for leaf in leaves if leaf.ndim), default=1)
        rows = [leaf for leaf in leaves if leaf.ndim and len(leaf) >= count]
        for row in range(int(count)):
            checksum = hashlib.blake2b(digest_size=8)
            for leaf in rows:
                # A ragged row is padded to the longest of its batch.
                checksum.update(_bytes(leaf[row]).rstrip(b"\0") + b"\1")
            self._sum = (self._sum + int.from_bytes(checksum.digest(), "little")) & _MASK
        self._count += int(count)

    def take(self) -> list[int] | None:
        """Returns `[number, sum]` and starts again; None if no batch was seen, as where workers read their own data."""
        taken = [self._count, self._sum]
        self._count = self._sum = 0
        return taken if taken[0] else None


def _dense(value: Structure) -> tf.Tensor:
    if isinstance(value, tf.RaggedTensor):
        return value.to_tensor()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return tf.convert_to_tensor(value)


def _bytes(values: Any) -> bytes:
    if isinstance(values, bytes):
        return values
    array = np.asarray(values)
    if array.dtype == object:  # strings
        return b"\2".join(array.ravel().tolist())
    return array.tobytes()


class Recorder:
    """Records the updates of one `fit` on this rank, and ends it after the number of updates of the arm."""

    def __init__(self, settings: Settings, model: keras.Model, done: int):
        global _fits, _done_before
        _fits += 1
        self._settings = settings
        self._model = model
        self._strategy: Strategy = model.distribute_strategy
        self._engine: Engine = self._strategy.engine
        self._step = done
        self._before_fit = _done_before
        _done_before += done  # a fit that was finished before a restart adds no update
        self._task = os.environ.get(progress.TASK, "worker-0")
        self._path = pathlib.Path(settings.folder) / f"{self._task}.jsonl"
        self._last = self._values()
        self._write(self._head())

    def add(self, logs: Logs) -> None:
        """Records an update. Before callbacks, which may change the model."""
        global _done_before
        self._engine.drain(self._model)
        self._step += 1
        _done_before = self._before_fit + self._step
        now = self._values()
        optimizers = optimizer_search.optimizers(self._model)
        gradient = None
        if not self._strategy.splits_state:  # else each process has its pieces
            kept = [part for optimizer in optimizers for part in _gradients.get(id(_leaf(optimizer)), [])]
            if kept:
                values = [variable.numpy().astype(np.float64).ravel() for variable in kept]
                gradient = _size_and_sketch("gradient", np.concatenate(values))
        self._write(
            {
                "kind": "update",
                "update": _done_before,
                "fit": _fits,
                "time": time.time(),
                "logs": _numbers(keras_loops.pythonify_logs(dict(logs or {}))),
                "gradient": gradient,
                "rate": [float(_leaf(optimizer).learning_rate.numpy()) for optimizer in optimizers],
                "iterations": [int(_leaf(optimizer).iterations.numpy()) for optimizer in optimizers],
                "examples": self._strategy.batch_record.take(),
                "variables": {path: _describe(path, parts, self._last[path]) for path, parts in now.items()},
            }
        )
        self._last = now

    def ends(self) -> bool:
        """Returns whether the `fit` ends here. Kills this process instead if it is its turn."""
        settings = self._settings
        if settings.kill_task == self._task and _done_before >= settings.kill_at > 0:
            self._kill_once()
        return _done_before >= settings.steps

    def _kill_once(self) -> None:
        mark = pathlib.Path(self._settings.folder) / "killed"
        if mark.exists():
            return
        # Only a resume from a backup tests anything.
        until = time.monotonic() + _BACKUP_SECONDS
        while time.monotonic() < until and not any(pathlib.Path(self._settings.backups).rglob("manifest*")):
            time.sleep(0.02)
        mark.write_text(str(_done_before))
        os.kill(os.getpid(), signal.SIGKILL)

    def _values(self) -> dict[str, list[np.ndarray]]:
        """Returns the values of the variables that are trained, one for each copy in this process."""
        local = self._strategy.experimental_local_results
        values = {}
        for variable in self._model.trainable_variables:
            if self._strategy.traits.shared_variables:
                copies = [keras.ops.convert_to_numpy(variable)]
            else:
                copies = [copy.numpy() for copy in local(variable.value)]
            values[variable.path] = copies
        return values

    def _head(self) -> dict[str, Any]:
        strategy = self._strategy
        compressors = map(optimizer_lib.get_compressor, map(_leaf, optimizer_search.optimizers(self._model)))
        return {
            "kind": "fit",
            "fit": _fits,
            "update": self._before_fit + self._step,
            "task": self._task,
            "model": self._model.name,
            "strategy": strategy.config.name,
            "replicas": self._engine.num_replicas,
            "asynchronous": strategy.traits.asynchronous,
            "compression": [each.description for each in compressors if each],
            "policy": keras.config.dtype_policy().name,
            "types": {layer.path: layer.compute_dtype for layer in self._layers() if layer.trainable_variables},
            "differs": dict(self._differences()),
            "initial": {path: _checksum(copies[0]) for path, copies in self._last.items()},
            "bytes": sum(copies[0].nbytes for copies in self._last.values()),
            "versions": {
                "tfdist": __version__,
                "keras": keras.__version__,
                "tensorflow": tf.__version__,
                "python": platform.python_version(),
            },
        }

    def _layers(self) -> Iterator[keras.layers.Layer]:
        for layer in keras_internals.layers(self._model):
            if not isinstance(layer, keras.Model):
                yield layer

    def _differences(self) -> Iterator[tuple[str, str]]:
        """Yields the layers that compute something else on several replicas than on one, and the remedy."""
        for layer in keras_internals.layers(self._model):
            where = layer.path or layer.name
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable:
                yield where, "normalizes by each replica's part of a batch: set synchronized=True"
            elif _draws(layer):
                yield where, "draws other random numbers on each replica: remove it to compare, or set its rate to 0"

    def _write(self, entry: dict[str, Any]) -> None:
        # In one write, and at once: the process may be killed.
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _leaf(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _draws(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer draws random numbers; recurrent layers could, but do not without a rate of their dropout."""
    if not any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()):
        return False
    rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
    return any(rates) or all(rate is None for rate in rates)


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B"))


def _size_and_sketch(name: str, values: np.ndarray) -> dict[str, Any]:
    """Returns the norm of values, and their sums with random signs, which are the same for a name in each process."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    signs = random.integers(0, 2, (SKETCHES, values.size), np.int8) * 2 - 1
    return {"norm": float(np.linalg.norm(values)), "sketch": (signs @ values).tolist()}


def _describe(path: str, copies: list[np.ndarray], before: list[np.ndarray]) -> dict[str, Any]:
    """Returns the checksum of a variable, the norm and the sketch of its update, and whether this process's replicas agree."""
    difference = np.ravel(copies[0].astype(np.float64) - before[0].astype(np.float64))
    checksums = {_checksum(copy) for copy in copies}
    return {"checksum": _checksum(copies[0]), "agrees": len(checksums) == 1, **_size_and_sketch(path, difference)}
