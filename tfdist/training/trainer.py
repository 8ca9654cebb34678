"""`Trainer`: fit, evaluate, predict, save and custom steps, the same under every strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist import compression as compression_lib
from tfdist.aliases import Function, Logs, Structure
from tfdist.backup.callback import BackupAndRestore
from tfdist.cluster import ClusterSpec, TaskSpec, preflight
from tfdist.compat import keras_internals, unsupported
from tfdist.compression.base import Compressor
from tfdist.config import CompressionConfig, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.monitoring import compression_report
from tfdist.runtime.log import logger
from tfdist.strategies import model_methods
from tfdist.training import checks, keras_distribution, loops, saving, startup
from tfdist.training.custom_step import Step
from tfdist.verify import settings as verify_settings


class Trainer:
    """Trains a Keras 3 model under a `tf.distribute` strategy.

        trainer = tfdist.Trainer(strategy="multi_worker_mirrored")
        with trainer.scope():
            model = build()
            model.compile(optimizer="adam", loss="mse")
        history = trainer.fit(model, train_data, epochs=3)
        trainer.save(model, "model.keras")

    A training run has these stages. The Trainer finds the cluster, connects its tasks and creates the strategy, which decides
    where each variable is placed (`startup`). `fit` compares the workers' arguments, gives the model a step function for
    all replicas, and runs the loop (`loops`). Each replica computes the gradients of its part of the batch; the
    replicas sum them, compressed if configured, and apply the same update. After a step all ranks agree on the decisions of
    callbacks, such as `stop_training` (`callback_sync`). A run that finds a backup resumes at its step. In `save` the chief writes.

    Under `parameter_server` the chief schedules steps on workers, and variables live on servers. In the other tasks the
    constructor does not return: it serves the chief, and then ends the process with the chief's exit code.

    Create the Trainer first, before any tensor, variable, model or dataset. Under several workers every worker runs the same
    program and calls the same methods in the same order; callbacks may be passed on all workers or on the chief only.

    Args:
        strategy: A strategy's name, a `StrategyConfig`, or a strategy from `create_strategy`. None means the strategy of
            `keras.distribution.set_distribution(DataParallel(...))`: `multi_worker_mirrored` in a cluster of several training tasks, else
            `mirrored`. None without a distribution means `mirrored`. A distribution that contradicts the strategy raises an error.
        cluster: The cluster and this process's task in it; None reads the environment (see `cluster.resolvers`); False means no cluster.
        backup_dir: The folder, shared by all tasks, where `fit` writes a backup after each epoch. A run that finds a
            backup there resumes from it. None means no backups, unless `backup` or a callback of `fit` is a `BackupAndRestore`.
        backup: A `BackupAndRestore`, for other options than a backup after each epoch.
        compression: The compression of gradients between replicas: a name of
            `tfdist.config.COMPRESSORS`, a `CompressionConfig`, or a compressor. Valid under `multi_worker_mirrored` and `mirrored`.
        start_timeout: Seconds to wait for the other tasks.
        check_weights: Whether workers compare all weights after each epoch, which copies them to the host. False compares only at the
            beginning and the end of `fit`.
        timeout_seconds: Seconds that tasks wait for a task that is slow, such as in a callback; they warn after 60 s, and the job ends at
            this limit, by default after 1,800 s. 0 means no limit (docs/hangs.md). `tfdist.slow` sets the limit of one part of
            your program.
        nan_policy: The action after a step whose loss or gradient is not finite: `"ignore"`; `"skip"` skips its update, on all
            replicas; `"stop"` skips its update and makes `fit` raise a FloatingPointError, on all ranks.
        distribution: A `keras.distribution.ModelParallel`, whose layout map says which variables live as pieces on the workers
            (docs/model-parallel.md). None means that of `keras.distribution.set_distribution`.
        **options: Further options, as for `create_strategy`, such as `sync_every=50`.

    Attributes:
        strategy: The strategy.
        cluster: The cluster, or None if this process trains alone.
        task: This process's task.

    Raises:
        ConfigError: As `create_strategy`; or both `backup_dir` and `backup` are given.

    Examples:
        >>> import keras, numpy as np, tfdist
        >>> trainer = tfdist.Trainer("mirrored")
        >>> with trainer.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = trainer.fit(model, np.ones((8, 4)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    def __init__(
        self,
        strategy: str | StrategyConfig | tf.distribute.Strategy | None = None,
        cluster: tuple[ClusterSpec, TaskSpec] | Literal[False] | None = None,
        backup_dir: str | os.PathLike[str] | None = None,
        backup: BackupAndRestore | None = None,
        compression: str | CompressionConfig | Compressor | None = None,
        start_timeout: float = preflight.START_TIMEOUT,
        check_weights: bool = True,
        timeout_seconds: float | None = None,
        nan_policy: str = "ignore",
        distribution: Any = None,
        **options: Any,
    ):
        if timeout_seconds is not None:
            options["timeout_seconds"] = timeout_seconds
        checks.check_options(Trainer, strategy, options)
        self._distribution = keras.distribution.distribution() if distribution is None else distribution
        if backup_dir is not None and backup is not None:
            raise ConfigError("backup_dir and backup both name a folder for backups. Remove backup_dir.")
        verified = verify_settings.current()
        if verified:
            compression = verified.compression or compression
            if verified.save_freq and backup is None:
                backup_dir = backup_dir or "backup"
        compressor = compression_lib.create(compression)
        if backup_dir is not None:
            backup = BackupAndRestore(backup_dir)
        self.strategy, cluster_and_task = startup.start_strategy(
            strategy, self._distribution, cluster, backup, start_timeout, options
        )
        if compressor:
            checks.check_compresses(self.strategy)
        checks.check_nan_policy(nan_policy, self.strategy)
        self._context = startup.create_context(self.strategy, cluster_and_task, backup, compressor, check_weights)
        self._context.engine.nan_policy = nan_policy
        if compressor and self._context.num_replicas == 1:
            self._context.notify_once(
                "compression has no effect: with one replica there is nothing to send, so nothing is compressed"
            )
        self.cluster: ClusterSpec | None = self._context.cluster
        self.task = self._context.task
        self._take_models()
        self._follow_distribution()

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes files and shows progress."""
        return self._context.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers; under `parameter_server`, of workers, which run asynchronously."""
        return self._context.num_replicas

    @property
    def backup(self) -> BackupAndRestore | None:
        """The backups of `fit`; None without them."""
        return self._context.backup

    @property
    def compression(self) -> Compressor | None:
        """The compressor of models that are not compiled yet; None without compression."""
        return self._context.engine.compressor

    @compression.setter
    def compression(self, compressor: str | CompressionConfig | Compressor | None) -> None:
        self._context.engine.compressor = compression_lib.create(compressor)

    @property
    def is_at_work(self) -> bool:
        """Returns whether `fit` or another method of this trainer is running; the model's methods then run as Keras' own."""
        return self._context.is_at_work

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy]:
        """The context in which to build (or load) and compile the model; its value is the strategy.

        The model's own `fit`, `evaluate` and `predict` then call this trainer's.

        Raises:
            ConfigError: A custom loop computes gradients or applies an optimizer outside of a replica; or a distribution that was set after
                the Trainer contradicts the strategy.
        """
        self._take_models()
        self._follow_distribution()
        with self.strategy.scope() as strategy:
            try:
                yield strategy
            except (AttributeError, ValueError) as e:
                unsupported.check_own_loop(e)
                raise

    def fit(self, model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains `model`, as Keras' `fit`.

        Under `parameter_server` one worker runs a step, on a batch of the global size, and several steps are in flight.
        Batch hooks run once per step, in order. Their logs lag by up to 13 steps with one worker, 16 with two, and 7
        per worker with more. They are complete at the end of an epoch. `stop_training` stops at the step whose hook sets it. The chief
        reads the data and sends each batch once. If `x` is a function, each worker creates its own dataset, which
        must be infinite; this needs `steps_per_epoch`.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `fit`, with these differences. `x` has batches of the global size, or is a function
                `(tf.distribute.InputContext) -> tf.data.Dataset` that returns the dataset of one input pipeline, with batches of
                the per-replica size; the same holds for `validation_data`. The chief alone shows progress and runs those `callbacks`
                that only write files (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor). All workers run ModelCheckpoint if
                each holds a part of the model's or the optimizer's state.
            **kwargs: As for Keras' `fit`.

        Returns:
            Keras' History, equal on all ranks.

        Raises:
            ClusterError: A task is lost that the others need.
            ConfigError: The model or the data hold something that this strategy cannot train.
        """
        return self._run("fit", model, args, kwargs)

    def evaluate(self, model: keras.Model, *args: Any, **kwargs: Any) -> Logs:
        """Evaluates `model`, as Keras' `evaluate`; every example counts once, whatever the number of replicas.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `evaluate`; `x` and `verbose` as for `fit`.
            **kwargs: As for Keras' `evaluate`.
        """
        return self._run("evaluate", model, args, kwargs)

    def predict(self, model: keras.Model, *args: Any, **kwargs: Any) -> Structure:
        """Returns the model's outputs for all of `x`, in its order, on every rank.

        Args:
            model: Built in `scope()`.
            *args: As for Keras' `predict`; `verbose` as for `fit`. A dataset is sharded by batches, even if its options
                request sharding by files.
            **kwargs: As for Keras' `predict`.
        """
        return self._run("predict", model, args, kwargs)

    def step(self, function: Callable[[Structure], dict[str, Any]], uses: Sequence[object]) -> Step:
        """Returns a training step for a loop of your own: GradientTape, several optimizers, reinforcement learning.

        Each replica runs the function on its part of a batch; a loss is the mean over this part. An optimizer in the function
        applies the gradient of the mean over the whole batch, compressed if the Trainer has a compressor.

        Args:
            function: Takes a batch, as a model's `train_step` does, and returns logs: a dict of numbers by name.
            uses: The models, optimizers, metrics, seed generators and variables that `function` uses, made in `scope()`. Backups hold their state.

        Raises:
            ConfigError: As for `Step`.
        """
        with self.scope():
            return Step(self._context, function, uses)

    def save(self, model: keras.Model, path: str | os.PathLike[str], delete_backup: bool = True, **kwargs: Any) -> None:
        """Saves `model` as one `.keras` file that plain Keras loads on one device.

        Call it on every rank: the chief writes, the others wait until the file is there. The chief writes under another
        name first, so that a reader never sees an incomplete file.

        Args:
            model: Built in `scope()`.
            path: A path that ends in `.keras`.
            delete_backup: Whether to remove the backups of finished trainings afterwards. A call during `fit`, from a callback, removes none.
            **kwargs: As for `model.save`.

        Raises:
            ConfigError: `path` does not end in `.keras`.
            ClusterError: On the other ranks, if the chief could not write.
        """
        with self._context.watching_workers():
            saving.save(self._context, model, path, **kwargs)
        if delete_backup and not self.is_at_work:
            self._context.delete_backup(self._context.backup)

    def export(
        self, model: keras.Model, path: str | os.PathLike[str], delete_backup: bool = True, **kwargs: Any
    ) -> None:
        """Exports `model` for inference, by default as a SavedModel that TensorFlow Serving loads.

        Call it on every rank: the chief writes, the others wait until the files are there. The files hold the weights under
        every strategy; under `parameter_server` the chief fetches them from the servers.

        Args:
            model: Built in `scope()`.
            path: The folder; TensorFlow Serving expects a number as the last component, such as `models/digits/1`.
            delete_backup: As for `save`.
            **kwargs: As for `model.export`, such as `format="onnx"`.

        Raises:
            ClusterError: On the other ranks, if the chief could not write.
        """
        kwargs.setdefault("verbose", False)
        with self._context.watching_workers():
            saving.export(self._context, model, path, **kwargs)
        if delete_backup and not self.is_at_work:
            self._context.delete_backup(self._context.backup)

    def write_together(self, saveable: Any, path: str, write: Callable[[], None]) -> bool:
        """Writes a file of a model or layer whose state is in parts on the workers; its own `save` and `save_weights` call it.

        Returns False, on all workers, if no state is in parts, or if callbacks that not all workers have may be running.
        """
        with self._context.watching_workers():
            return saving.write_together(self._context, saveable, path, write)

    def on_model_saved(self, model: keras.Model) -> None:
        """Removes the backups of the finished trainings of `model`. The model's own `save` and `export` call it.

        Not a collective, as one worker may save alone: the chief's call removes the files of all ranks. During `fit` it does nothing.
        """
        if self._context.backup and not self.is_at_work:
            self._context.backup.delete_of(model)

    def delete_backup(self) -> None:
        """Removes the backups of finished trainings at once. Call it on every rank, after all results are written."""
        self._context.delete_backup(self._context.backup, at_once=True)

    def server_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns statistics of the parameter servers; empty under other strategies.

        Args:
            model: The model.

        Returns:
            `retried_steps`: training steps that ran again because their worker was lost; each may have been applied twice
            or in part. `staleness`: how many updates other workers applied while a step ran, `mean` and `max` over the steps of
            this process, or None. `bytes_per_server`: the size of the model's and its optimizers' variables on each server.
        """
        return self._context.engine.report(model)

    def compression_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns how long the exchange of `model`'s gradients takes with and without compression. Call it after `fit`. A collective.

        Args:
            model: The model.

        Returns:
            `exchange_ms`: milliseconds to sum all gradients, `compressed` and `plain`, measured now; None
            without a compressor. Logs a warning if compression is not faster.
        """
        times = compression_report.exchange_ms(model)
        if times and times["compressed"] >= times["plain"] and self.is_chief:
            logger.warning(compression_report.NO_GAIN_WARNING.format(**times))
        return {"exchange_ms": times}

    def print_replicas(self, global_batch_size: int | None) -> None:
        """Prints the number of replicas, once and on the chief only. `fit` calls it.

        Args:
            global_batch_size: Examples per step, or None if unknown.
        """
        self._context.print_replicas(global_batch_size)

    def call(self, name: str, method: Function, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Runs a method that was called on the model as if it were called on this trainer; `method` is that of Keras."""
        self._follow_distribution()
        if name in loops.LOOPS or not keras_internals.has_replaced_make_function(model):
            self._context.attach(model, "fit")
        return loops.run(self._context, name, method, model, args, kwargs)

    def _take_models(self) -> None:
        """Makes models that are created in the strategy's scope use this trainer."""
        self.strategy.trainer = self
        self.strategy.engine = self._context.engine

    def _follow_distribution(self) -> None:
        """Compares Keras' distribution with the strategy, and takes over its `auto_shard_dataset`, which the user may change at any time."""
        distribution = keras.distribution.distribution() or self._distribution
        keras_distribution.check(distribution, self.strategy)
        self.strategy.batches_are_parts = distribution is not None and not distribution.auto_shard_dataset

    def _run(self, name: str, model: keras.Model, args: Any, kwargs: Any) -> Any:
        self._follow_distribution()
        self._context.attach(model, name)
        method = getattr(type(model), name)
        if model_methods.is_replaced(method, name):  # it calls Keras' method, which calls `call`
            self._take_models()
            return method(model, *args, **kwargs)
        return loops.run(self._context, name, model_methods.keras_own(name), model, args, kwargs)
