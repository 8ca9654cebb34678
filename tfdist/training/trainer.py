"""`Trainer`: fit, evaluate, predict and save, the same under every strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist import compression as compression_lib
from tfdist.backup.callback import BackupAndRestore
from tfdist.cluster import ClusterSpec, TaskSpec, preflight
from tfdist.collectives import factory
from tfdist.compat import keras_internals, unsupported
from tfdist.compression.base import Compressor
from tfdist.config import CompressionConfig, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.training import console, loops, saving, startup


class Trainer:
    """Trains a Keras 3 model under a `tf.distribute` strategy.

        trainer = tfdist.Trainer(strategy="multi_worker_mirrored")
        with trainer.scope():
            model = build()
            model.compile(optimizer="adam", loss="mse")
        history = trainer.fit(model, train_data, epochs=3)
        trainer.save(model, "model.keras")

    A training has these stages. The Trainer finds the cluster, connects its tasks and creates the strategy, which decides
    where each variable lives (`startup`). `fit` compares what the workers were given, gives the model a step function for
    all replicas, and calls Keras' own loop (`loops`). Each replica computes the gradients of its part of the batch; the
    replicas sum them, compressed if asked to, and apply the same update. After a step all ranks agree on what callbacks
    have decided (`callback_sync`). A backup restarts a training at the step where it ended. `save` has the chief write.

    Under `parameter_server` the chief schedules steps on workers, and variables live on servers. In the other tasks the
    constructor serves the chief, and then ends the process with the chief's exit code.

    Create it first, before any tensor, variable, model or dataset. Under several workers every worker runs the same
    program and calls the same methods in the same order; callbacks may be given to all of them or to the chief alone.

    Args:
        strategy: A strategy's name, a `StrategyConfig`, or a strategy from `create_strategy`.
        cluster: The cluster and this process's task in it; None means what the environment says (see `cluster.resolvers`), False none.
        backup_dir: Where `fit` backs the training up after each epoch, a folder that all tasks share; a run that finds a
            backup there goes on from it. None means no backups, unless there is a `backup`, or `fit` is given one.
        backup: How to back up, where it is not after each epoch.
        compression: How gradients are compressed on their way to the other replicas: a name of
            `tfdist.config.COMPRESSORS`, a `CompressionConfig`, or a compressor. Under `multi_worker_mirrored` and `mirrored`.
        start_timeout: Seconds to wait for the other tasks.
        check_weights: Whether workers compare all their weights after each epoch, which costs a copy of them to the host; else
            only before and after the training.
        **options: As for `create_strategy`.

    Attributes:
        strategy: The strategy.
        compression: The compressor, or None.
        cluster: The cluster, or None where this process trains alone.
        task: This process's task.

    Raises:
        ConfigError: As `create_strategy`; or both `backup_dir` and `backup` are given.
    """

    def __init__(
        self,
        strategy: str | StrategyConfig | tf.distribute.Strategy = "mirrored",
        cluster: tuple[ClusterSpec, TaskSpec] | Literal[False] | None = None,
        backup_dir: str | os.PathLike[str] | None = None,
        backup: BackupAndRestore | None = None,
        compression: str | CompressionConfig | Compressor | None = None,
        start_timeout: float = preflight.START_TIMEOUT,
        check_weights: bool = True,
        **options: Any,
    ):
        if backup_dir is not None and backup is not None:
            raise ConfigError("backup_dir and backup both say where to back up: leave backup_dir out.")
        self.compression: Compressor | None = compression_lib.create(compression)
        backup = BackupAndRestore(backup_dir) if backup_dir is not None else backup
        self.strategy, found = startup.start_strategy(strategy, cluster, backup, start_timeout, options)
        if self.compression:
            factory.check_strategy(self.strategy)
        self._context = startup.create_context(self.strategy, found, backup, check_weights)
        self.cluster: ClusterSpec | None = self._context.cluster
        self.task = self._context.task
        self.strategy.trainer = self

    @property
    def is_at_work(self) -> bool:
        """Whether `fit` or another method is running, so that what it calls of a model is Keras' own."""
        return self._context.is_at_work

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self._context.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers; under `parameter_server` they are not in step."""
        return self._context.num_replicas

    def server_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns what a report says of parameter servers; empty without them.

        Args:
            model: The model.

        Returns:
            `retried_steps`: training steps that ran again because their worker was lost; each may have been applied twice
            or in part. `bytes_per_server`: the size of the model's and its optimizers' variables on each server.
        """
        return self._context.server_report(model)

    def say_replicas(self, global_batch_size: int | None) -> None:
        """Prints, on the chief and once, on how many replicas it trains; `fit` does so by itself.

        Args:
            global_batch_size: Examples per step, or None if unknown.
        """
        self._context.print_replicas(global_batch_size)

    def compression_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns what the compressor does for `model`'s gradients, once trained. A collective.

        Args:
            model: The model.

        Returns:
            `exchange_ms`: milliseconds that the sum of all gradients takes, `compressed` and `plain`, measured now; None
            without a compressor. Prints a warning if compression makes it no faster.
        """
        return console.exchange_times(model, self.is_chief)

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy]:
        """The context in which to build (or load) and compile the model; its value is the strategy.

        The model's own `fit`, `evaluate` and `predict` then do what this trainer's do.

        Raises:
            ConfigError: A loop of the user's own takes gradients or applies an optimizer outside of a replica.
        """
        self.strategy.trainer = self
        with self.strategy.scope() as strategy:
            try:
                yield strategy
            except (AttributeError, ValueError) as e:
                unsupported.check_own_loop(e)
                raise

    def call(self, name: str, method: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Does what a model's own method is called for.

        Args:
            name: The method's name.
            method: Keras' method.
            model: The model.
            args: Its arguments by place.
            kwargs: Its arguments by name.
        """
        if name in loops.LOOPS:
            self._attach(model)
            return loops.LOOPS[name](self._context, method, model, args, kwargs)
        if self._context.coordinator or not keras_internals.has_replaced_make_function(model):
            self._attach(model)
        return loops.on_batch(self._context, name, method, model, args, kwargs)

    def fit(self, model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains `model`, as Keras' `fit`.

        Under `parameter_server` a step is one worker's, on a batch of the global size, and several steps are in flight.
        Batch hooks run once per step, in order. Their logs lag by up to seven steps for each worker (13 for one, 16 for
        two), and are complete at the end of an epoch. `stop_training` stops at the step whose hook sets it. The chief
        reads the data and sends each batch once. With a function each worker makes its own data, which must not end;
        this needs `steps_per_epoch`.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `fit`, with these differences. `x` has batches of the global size, or is a function
                `(tf.distribute.InputContext) -> tf.data.Dataset` that returns one input pipeline's batches of the
                per-replica size; so may `validation_data`. The chief alone shows progress and runs those `callbacks`
                that only write files (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor).
            **kwargs: As for Keras' `fit`.

        Returns:
            Keras' History, equal on all ranks.

        Raises:
            ClusterError: A task is lost that the others cannot do without.
            ConfigError: The model or the data hold something that this strategy cannot train.
        """
        self._attach(model, "fit")
        return loops.fit(self._context, type(model).fit, model, args, kwargs)

    def evaluate(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Evaluates `model`, as Keras' `evaluate`; every example counts once, whatever the number of replicas.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `evaluate`; `x` and `verbose` as for `fit`.
            **kwargs: As for Keras' `evaluate`.
        """
        self._attach(model, "evaluate")
        return loops.evaluate(self._context, type(model).evaluate, model, args, kwargs)

    def predict(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs for all of `x`, in its order, on every rank.

        Args:
            model: Built in `scope()`.
            *args: As for Keras' `predict`; `verbose` as for `fit`. A dataset is sharded by batches, even if its options
                ask for whole files.
            **kwargs: As for Keras' `predict`.
        """
        self._attach(model, "predict")
        return loops.predict(self._context, type(model).predict, model, args, kwargs)

    def save(self, model: keras.Model, path: str | os.PathLike[str], delete_backup: bool = True, **kwargs: Any) -> None:
        """Saves `model` as one `.keras` file that plain Keras loads on one device.

        Call it on every rank: the chief writes, the others wait until the file is there. The chief writes under another
        name first, so that no reader ever sees half of the file.

        Args:
            model: Built in `scope()`.
            path: A path that ends in `.keras`.
            delete_backup: Whether then to remove the backups of trainings that have come to their end.
            **kwargs: As for `model.save`.

        Raises:
            ConfigError: `path` does not end in `.keras`.
            ClusterError: On the other ranks, where the chief could not write.
        """
        with self._context.watching_workers():
            saving.save(self._context, model, path, **kwargs)
        if delete_backup:
            self.delete_backup()

    def delete_backup(self) -> None:
        """Removes the backups of trainings that have come to their end. Call it on every rank, with all results written."""
        with self._context.watching_workers():
            self._context.ranks.barrier()
            if self._context.backup:
                self._context.backup.delete()
            self._context.ranks.barrier()  # or one rank might begin to write there again

    def _attach(self, model: keras.Model, method: str = "fit") -> None:
        self._context.attach(model, self.compression, method)
