"""`Trainer`: fit, evaluate, predict and save, the same under every strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import data as data_lib
from tfdist import lockstep
from tfdist.cluster import ClusterSpec, TaskSpec, from_environment
from tfdist.config import StrategyConfig
from tfdist.errors import ClusterError, ConfigError
from tfdist.strategies import create_strategy

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class Trainer:
    """Trains a Keras 3 model under a `tf.distribute` strategy.

        trainer = tfdist.Trainer(strategy="multi_worker_mirrored")
        with trainer.scope():
            model = build()
            model.compile(optimizer="adam", loss="mse")
        history = trainer.fit(model, train_data, epochs=3)
        trainer.save(model, "model.keras")

    Create it first, before any tensor, variable, model or dataset. Under several workers every worker runs the same
    program and calls the same methods in the same order; callbacks may be given to all of them or to the chief alone.

    Args:
        strategy: A strategy's name, a `StrategyConfig`, or a strategy from `create_strategy`.
        cluster: The cluster and this process's task in it; None means what the environment says (TF_CONFIG).
        **options: As for `create_strategy`.

    Attributes:
        strategy: The strategy.
        cluster: The cluster, or None where this process trains alone.
        task: This process's task.
        is_chief: Whether this process writes files and shows progress.

    Raises:
        ConfigError: As `create_strategy`.
    """

    def __init__(
        self,
        strategy: str | StrategyConfig | tf.distribute.Strategy = "mirrored",
        cluster: tuple[ClusterSpec, TaskSpec] | None = None,
        **options: Any,
    ):
        if not isinstance(strategy, tf.distribute.Strategy):
            strategy = create_strategy(strategy, cluster, **options)
        elif not hasattr(strategy, "statistics") or options:
            raise ConfigError(
                "strategy must be a name, a StrategyConfig, or a strategy made by tfdist.create_strategy, and options "
                f"go with the first two. Received: {type(strategy).__name__}, options {sorted(options)}."
            )
        self.strategy = strategy
        multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        found = cluster or from_environment()
        if not multi_worker:
            _refuse_to_train_alone(found, type(strategy).__name__)
            found = None
        self.cluster: ClusterSpec | None = found[0] if found else None
        self.task = found[1] if found else TaskSpec("worker", 0)
        tasks = self.cluster.training_tasks() if self.cluster else [self.task]
        self._ranks = lockstep.Ranks(strategy, tasks.index(self.task), len(tasks))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self._ranks.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers."""
        return self.strategy.num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the model must be built (or loaded) and compiled."""
        return self.strategy.scope()

    def fit(
        self,
        model: keras.Model,
        train_data: Any,
        *args: Any,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_data: Any = None,
        verbose: str | int = "auto",
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Trains `model`, as Keras' `fit`.

        Args:
            model: Built and compiled in `scope()`.
            train_data: What `fit` takes as `x`, in batches of the global size, or a function
                `(tf.distribute.InputContext) -> tf.data.Dataset` that returns one input pipeline's batches of the
                per-replica size.
            *args: `y`, `batch_size`, ... as for `fit`.
            callbacks: Keras callbacks. Those that only write files (ModelCheckpoint, CSVLogger, TensorBoard,
                RemoteMonitor) run on the chief alone.
            validation_data: As for `fit`, or a function as `train_data`.
            verbose: As for `fit`; the chief alone shows progress.
            **kwargs: As for `fit`.

        Returns:
            Keras' History, equal on all ranks.
        """
        self._check(model)
        train_data = self._distribute(train_data)
        if not args and isinstance(train_data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
            kwargs.setdefault("shuffle", False)  # or Keras warns that it will not shuffle a dataset
        if self.num_replicas > 1 and any(v.value in self.strategy.statistics for v in model.non_trainable_variables):
            # As Keras chooses it: 32, or with steps_per_epoch what then fills each step but the last.
            batch_size = kwargs.get("batch_size", args[1] if len(args) > 1 else None)
            if batch_size or "steps_per_epoch" not in kwargs:
                share = 1 - kwargs.get("validation_split", 0.0)
                train_data = data_lib.feeding_all_replicas(train_data, batch_size or 32, self.num_replicas, share)
        with self.strategy.statistics.managed():
            model.fit(
                train_data,
                *args,
                callbacks=self._wrap(callbacks),
                validation_data=self._distribute(validation_data),
                verbose=verbose if self.is_chief else 0,
                **kwargs,
            )
        return model.history

    def evaluate(self, model: keras.Model, data: Any, *args: Any, verbose: str | int = "auto", **kwargs: Any) -> Any:
        """Evaluates `model`, as Keras' `evaluate`; every example counts once, whatever the number of replicas.

        Args:
            model: Built and compiled in `scope()`.
            data: As `train_data` of `fit`.
            *args: As for Keras' `evaluate`.
            verbose: As for Keras' `evaluate`; the chief alone shows progress.
            **kwargs: As for Keras' `evaluate`.
        """
        self._check(model)
        with self.strategy.statistics.managed():
            return model.evaluate(self._distribute(data), *args, verbose=verbose if self.is_chief else 0, **kwargs)

    def predict(self, model: keras.Model, data: Any, *args: Any, verbose: str | int = "auto", **kwargs: Any) -> Any:
        """Returns the model's outputs for all of `data`, in its order, on every rank.

        Args:
            model: Built in `scope()`.
            data: As for Keras' `predict`. A dataset is sharded by batches, even if its options ask for whole files.
            *args: As for Keras' `predict`.
            verbose: As for Keras' `predict`; the chief alone shows progress.
            **kwargs: As for Keras' `predict`.
        """
        self._check(model)
        if isinstance(data, tf.data.Dataset):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
            data = data.with_options(options)
        with self.strategy.statistics.managed():
            return model.predict(self._distribute(data), *args, verbose=verbose if self.is_chief else 0, **kwargs)

    def save(self, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves `model` as one `.keras` file that plain Keras loads on one device.

        Safe on every rank, and must be called on every rank: the chief writes, the others wait until the file is
        there. It is written under another name first, so that no reader ever sees half of it.

        Args:
            model: Built in `scope()`.
            path: A path that ends in `.keras`.
            **kwargs: As for `model.save`.

        Raises:
            ConfigError: `path` does not end in `.keras`.
            ClusterError: On the other ranks, where the chief could not write.
        """
        path = os.fspath(path)
        if not path.endswith(".keras"):
            raise ConfigError(f"path must end in '.keras'. Received: {path!r}.")
        self.strategy.statistics.desynchronize()  # a loop of the user's own may have trained
        self.strategy.statistics.synchronize()
        error: Exception | None = None
        overwrite = kwargs.pop("overwrite", True)
        if self.is_chief:
            partial = path.removesuffix(".keras") + ".partial.keras"
            try:
                if not overwrite and tf.io.gfile.exists(path):
                    raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
                model.save(partial, **kwargs)
                tf.io.gfile.rename(partial, path, overwrite=True)
            except Exception as e:
                error = e
        failed = self._ranks.gather(float(error is not None))[0, 0]
        if error is not None:
            raise error
        if failed:
            raise ClusterError(f"The chief could not write {path!r}; its own message says why.")

    def _wrap(self, callbacks: Sequence[keras.callbacks.Callback] | None) -> list[keras.callbacks.Callback]:
        given = getattr(callbacks, "callbacks", callbacks)  # a keras CallbackList
        given = [given] if isinstance(given, keras.callbacks.Callback) else list(given or [])
        for callback in given:
            if isinstance(callback, keras.callbacks.BackupAndRestore) and self._ranks.size > 1:
                raise ConfigError(
                    "keras.callbacks.BackupAndRestore lets every worker overwrite the others' backup and repeats "
                    "steps after a restore; take it out of callbacks."
                )
        return lockstep.wrap(given, self.strategy, self._ranks)

    def _distribute(self, data: Any) -> Any:
        return self.strategy.distribute_datasets_from_function(data) if callable(data) else data

    def _check(self, model: keras.Model) -> None:
        if model.distribute_strategy is not self.strategy:
            raise ConfigError(
                f"Model {model.name!r} was not built in this trainer's scope: build and compile it in "
                "`with trainer.scope():`."
            )
        if self.num_replicas > 1 and (faults := list(_unsupported(model))):
            raise ConfigError(faults)


def _refuse_to_train_alone(found: tuple[ClusterSpec, TaskSpec] | None, strategy: str) -> None:
    """Raises where this process is one of several that would each train the whole and overwrite the others' files."""
    if found and found[1].type != "evaluator" and len(found[0].training_tasks()) > 1:
        raise ConfigError(
            f"{strategy} trains in one process, but this one is {found[1]} of {len(found[0].training_tasks())} training "
            "tasks (TF_CONFIG); use strategy multi_worker_mirrored, or unset TF_CONFIG."
        )


def _unsupported(model: keras.Model) -> Iterator[str]:
    """Yields what Keras 3 gets wrong with several replicas and tfdist does not cure yet."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield "mixed_float16 (a LossScaleOptimizer) is not supported with several replicas; use mixed_bfloat16."
    if getattr(optimizer, "gradient_accumulation_steps", None):
        yield "gradient_accumulation_steps is not supported with several replicas; leave it out."
    if getattr(optimizer, "use_ema", False) and getattr(optimizer, "ema_overwrite_frequency", None):
        yield "ema_overwrite_frequency is not supported with several replicas; leave it out (use_ema works)."
    if model.jit_compile:
        yield "jit_compile=True is not supported with several replicas; compile with jit_compile=False."
    if getattr(model, "steps_per_execution", 1) > 1:
        yield f"steps_per_execution={model.steps_per_execution} is not supported with several replicas; leave it at 1."
