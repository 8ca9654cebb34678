"""`Trainer`: fit, evaluate, predict and save, the same under every strategy."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

from tfdist import compression as compression_lib
from tfdist.backup import compatibility
from tfdist.backup.callback import BackupAndRestore
from tfdist.backup.data_position import LoopTracker
from tfdist.cluster import ClusterSpec, TaskSpec, preflight
from tfdist.cluster.resolvers import discovery
from tfdist.collectives import factory, ranks
from tfdist.compat import keras_internals, unsupported
from tfdist.compression.base import Compressor
from tfdist.config import CompressionConfig, StrategyConfig
from tfdist.data import generator
from tfdist.errors import ClusterError, ConfigError
from tfdist.monitoring import compression_report
from tfdist.parameter_server import termination
from tfdist.parameter_server.engine import Coordinator
from tfdist.parameter_server.strategy import ParameterServerStrategy, bytes_per_server
from tfdist.runtime import exit_status
from tfdist.runtime.preemption import GRACE_SECONDS
from tfdist.step import execution
from tfdist.strategies import model_methods
from tfdist.strategies.factory import create_strategy
from tfdist.training import arguments, callback_sync, consistency, file_callbacks, lost_workers

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
    Under `parameter_server` the chief alone goes on from here: in the other tasks this serves the chief, and ends their
    processes when it has ended, with its exit code.

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
        is_chief: Whether this process writes files and shows progress.

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
        self._backup = BackupAndRestore(backup_dir) if backup_dir is not None else backup
        listens = self._backup and self._backup.preemption
        if listens:
            listens.listen()  # from now on: a strategy may wait for its peers
        found = discovery.find_cluster(timeout=start_timeout) if cluster is None else cluster or None
        if not isinstance(strategy, tf.distribute.Strategy):
            grace = listens.grace_seconds if listens else GRACE_SECONDS
            strategy = create_strategy(strategy, found or False, start_timeout, grace, **options)
        elif not hasattr(strategy, "statistics") or options:
            raise ConfigError(
                "strategy must be a name, a StrategyConfig, or a strategy made by tfdist.create_strategy, and options "
                f"go with the first two. Received: {type(strategy).__name__}, options {sorted(options)}."
            )
        if listens:
            listens.listen()  # TensorFlow has taken the signal
        if self._backup:
            self._backup.restore_seed()
        self.strategy = strategy
        if self.compression:
            factory.check_strategy(strategy)
        multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self._coordinator = Coordinator(strategy) if isinstance(strategy, ParameterServerStrategy) else None
        if self._coordinator:
            found = (strategy.cluster, strategy.cluster.chief)
            if listens:
                listens.on_exit = functools.partial(termination.publish_exit_code, strategy.cluster)
        elif not multi_worker:
            _check_not_one_of_several(found, type(strategy).__name__)
            found = None
        self.cluster: ClusterSpec | None = found[0] if found else None
        self.task = found[1] if found else TaskSpec("worker", 0)
        tasks = self.cluster.training_tasks() if self.cluster and multi_worker else [self.task]
        self._ranks = ranks.Ranks(strategy, tasks.index(self.task), len(tasks))
        self._depth = 0  # of what this does with a model
        self._has_said = False
        self._check_weights = check_weights
        strategy.trainer = self

    @property
    def is_at_work(self) -> bool:
        """Whether `fit` or another method is running, so that what it calls of a model is Keras' own."""
        return self._depth > 0

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self._ranks.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas over all workers; under `parameter_server` they are not in step."""
        return self._coordinator.scheduler.workers if self._coordinator else self.strategy.num_replicas_in_sync

    def server_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns what concerns parameter servers, or nothing where there are none.

        Args:
            model: The model.

        Returns:
            `retried_steps`: training steps so far that ran again because their worker was lost, each of which may have
            been applied twice or in part; `bytes_per_server`: of the model's and its optimizers' variables, by server.
        """
        if not self._coordinator:
            return {}
        return {"retried_steps": self._coordinator.retried_steps, "bytes_per_server": bytes_per_server(model)}

    def say_replicas(self, global_batch_size: int | None) -> None:
        """Says on the chief, once, on how many replicas it trains; `fit` does so by itself.

        Args:
            global_batch_size: Examples per step, or None if unknown.
        """
        told, self._has_said = self._has_said, True
        if told or not self.is_chief:
            return
        number, batch = self.num_replicas, global_batch_size
        if self._coordinator:
            batches = "" if batch is None else f", each with batches of {batch}"
            sentence = f"{number} worker{'s' if number > 1 else ''}{batches}"
        else:
            share = f" = {number} x {(batch or 0) // number}" if batch and batch % number == 0 else ", dealt out evenly"
            batches = "" if batch is None else f", global batch {batch}{share}"
            sentence = f"{number} replica{'s' if number > 1 else ''}{batches}"
        print(f"{self.strategy.kind}: {sentence}", flush=True)

    def compression_report(self, model: keras.Model) -> dict[str, Any]:
        """Returns what the compressor does for `model`'s gradients, once trained. A collective.

        Args:
            model: The model.

        Returns:
            `exchange_ms`: milliseconds that the sum of all gradients takes, `compressed` and `plain`, each measured some
            times now; None without a compressor. Where the first is not less, it says so.
        """
        times = compression_report.exchange_ms(model)
        if times and times["compressed"] >= times["plain"] and self.is_chief:
            print(compression_report.NO_GAIN_WARNING.format(**times), flush=True)
        return {"exchange_ms": times}

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy]:
        """The context in which the model must be built (or loaded) and compiled; its value is the strategy.

        By its own `fit`, `evaluate` and `predict` it trains as by this trainer's.

        Raises:
            ConfigError: Within it, a loop of one's own takes gradients or applies an optimizer, which a replica must do.
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
        if name in ("fit", "evaluate", "predict"):
            self._check(model)
            return getattr(self, f"_{name}")(method, model, args, kwargs)
        if self._coordinator is None:
            if keras_internals.KERAS_MAKE_FUNCTION not in vars(model):
                self._check(model)
            return method(model, *args, **kwargs)
        self._check(model)
        runs = (
            self._coordinator.predict_on_workers(model, None)
            if name == "predict_on_batch"
            else self._coordinator.run_on_workers(model)
        )
        with self._working(), runs:
            return method(model, *args, **kwargs)

    def fit(self, model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains `model`, as Keras' `fit`.

        Under `parameter_server` a step is one worker's, on a batch of the global size, and several are on their way at once.
        Batch hooks come once a step, in order; the logs that they get lag by up to seven steps for each worker
        (13 for one, 16 for two), and are complete at the end of an epoch. `stop_training` stops at the step whose hook sets it. Data are read by the
        chief, which sends each batch once; a function's data are made by each worker for itself, need `steps_per_epoch`,
        and must not end.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `fit`, with these differences. `x` is in batches of the global size, or a function
                `(tf.distribute.InputContext) -> tf.data.Dataset` that returns one input pipeline's batches of the
                per-replica size; so may be `validation_data`. Of `callbacks`, those that only write files
                (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor) run on the chief alone, and with `verbose` the
                chief alone shows progress.
            **kwargs: As for Keras' `fit`.

        Returns:
            Keras' History, equal on all ranks.

        Raises:
            ClusterError: A task is lost that the others cannot do without.
            ConfigError: The model or the data hold something that this strategy cannot train.
        """
        self._check(model, "fit")
        return self._fit(type(model).fit, model, args, kwargs)

    def _fit(self, method: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any) -> keras.callbacks.History:
        given = arguments.bind_arguments(keras.Model.fit, method, model, args, kwargs)
        x = arguments.data_argument(method, given)
        data, validation = given.pop(x, None), given.pop("validation_data", None)
        for each in (data, validation):
            unsupported.check_data(self.strategy, each)
        with self._watching():
            consistency.check_consistency(self._ranks, data, validation, given)
        if given.get("verbose", "auto") != 0:
            self.say_replicas(arguments.batch_size(data, given))
        steps, validation_steps = given.get("steps_per_epoch"), given.get("validation_steps")
        if isinstance(data, tf.data.Dataset) and arguments.ends_within_execution(model, steps):
            # Keras would count the steps that it does not run, and end before the data does.
            data = data.filter(lambda *_: True)
        if arguments.is_function(data) or isinstance(data, (tf.data.Dataset, types.GeneratorType)):
            given.setdefault("shuffle", False)  # or Keras warns that it will not shuffle
        weights = given.pop("class_weight", None) if arguments.is_function(data) else None
        limit = execution.StepLimit(steps, validation_steps)
        callbacks = arguments.as_list(given.pop("callbacks", None))
        backup = next((each for each in callbacks if isinstance(each, BackupAndRestore)), self._backup)
        chiefs_files = file_callbacks.redirect_to_temporary_files([] if self.is_chief else callbacks)
        with self._running(model), self._backing_up(backup, model, data, given), chiefs_files:
            callbacks = [limit, *self._wrap([each for each in callbacks if each is not backup])]
            if backup:
                if not any(isinstance(each, keras.callbacks.History) for each in callbacks):
                    callbacks.append(keras.callbacks.History())  # or Keras would put it behind the backup
                backup.watch(callbacks)
                callbacks.append(backup)
                self._backup = backup
            method(
                model,
                **{x: self._distribute(data, class_weight=weights)},
                callbacks=callbacks,
                validation_data=self._distribute(validation),
                verbose=self._shown(given),
                **given,
            )
        for sentence in compression_report.faults(model) if self.is_chief else ():
            print(sentence, flush=True)
        return model.history

    def evaluate(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Evaluates `model`, as Keras' `evaluate`; every example counts once, whatever the number of replicas.

        Args:
            model: Built and compiled in `scope()`.
            *args: As for Keras' `evaluate`; `x` and `verbose` as for `fit`.
            **kwargs: As for Keras' `evaluate`.
        """
        self._check(model, "evaluate")
        return self._evaluate(type(model).evaluate, model, args, kwargs)

    def _evaluate(self, method: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any) -> Any:
        given = arguments.bind_arguments(keras.Model.evaluate, method, model, args, kwargs)
        x = arguments.data_argument(method, given)
        unsupported.check_data(self.strategy, given.get(x))
        limit = execution.StepLimit(None, given.get("steps"))
        with self._running(model):
            return method(
                model,
                **{x: self._distribute(given.pop(x, None))},
                callbacks=[limit, *arguments.as_list(given.pop("callbacks", None))],
                verbose=self._shown(given),
                **given,
            )

    def predict(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs for all of `x`, in its order, on every rank.

        Args:
            model: Built in `scope()`.
            *args: As for Keras' `predict`; `verbose` as for `fit`. A dataset is sharded by batches, even if its options
                ask for whole files.
            **kwargs: As for Keras' `predict`.
        """
        self._check(model, "predict")
        return self._predict(type(model).predict, model, args, kwargs)

    def _predict(self, method: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any) -> Any:
        given = arguments.bind_arguments(keras.Model.predict, method, model, args, kwargs)
        x = arguments.data_argument(method, given)
        data, steps = given.pop(x), given.get("steps")
        unsupported.check_data(self.strategy, data)
        if arguments.takes(method, "callbacks"):
            given["callbacks"] = [execution.StepLimit(), *arguments.as_list(given.pop("callbacks", None))]
        if self._coordinator:
            with self._working(), self._coordinator.predict_on_workers(model, steps):
                data = self._distribute(data)
                return method(model, **{x: data}, verbose=self._shown(given), **given)
        if isinstance(data, tf.data.Dataset):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
            data = data.with_options(options)
            if arguments.ends_within_execution(model, steps):
                data = data.take(steps)
        elif arguments.ends_within_execution(model, steps):
            raise ConfigError(
                f"steps={steps} of predict must be a multiple of steps_per_execution={model.steps_per_execution} "
                "unless the data are a tf.data.Dataset."
            )
        with self._running(model):
            data = self._distribute(data)
            return method(model, **{x: data}, verbose=self._shown(given), **given)

    def save(self, model: keras.Model, path: str | os.PathLike[str], delete_backup: bool = True, **kwargs: Any) -> None:
        """Saves `model` as one `.keras` file that plain Keras loads on one device.

        Safe on every rank, and must be called on every rank: the chief writes, the others wait until the file is
        there. It is written under another name first, so that no reader ever sees half of it.

        Args:
            model: Built in `scope()`.
            path: A path that ends in `.keras`.
            delete_backup: Whether then to remove the backups of trainings that have come to their end.
            **kwargs: As for `model.save`.

        Raises:
            ConfigError: `path` does not end in `.keras`.
            ClusterError: On the other ranks, where the chief could not write.
        """
        path = os.fspath(path)
        if not path.endswith(".keras"):
            raise ConfigError(f"path must end in '.keras'. Received: {path!r}.")
        explained = self._coordinator.scheduler.explain_errors() if self._coordinator else contextlib.nullcontext()
        self.strategy.statistics.desynchronize()  # a loop of the user's own may have trained
        self.strategy.statistics.synchronize()
        error: Exception | None = None
        overwrite = kwargs.pop("overwrite", True)
        if self.is_chief:
            partial = path.removesuffix(".keras") + ".partial.keras"
            try:
                if not overwrite and tf.io.gfile.exists(path):
                    raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
                tf.io.gfile.makedirs(os.path.dirname(path) or ".")
                with explained, self._working():
                    model_methods.outside_of_scopes(model_methods.keras_own("save"), model, partial, **kwargs)
                tf.io.gfile.rename(partial, path, overwrite=True)
            except Exception as e:
                error = e
        failed = self._ranks.gather(float(error is not None))[0, 0]
        if error is not None:
            raise error
        if failed:
            raise ClusterError(f"The chief could not write {path!r}; its own message says why.")
        if delete_backup:
            self.delete_backup()

    def delete_backup(self) -> None:
        """Removes the backups of trainings that have come to their end. Call it on every rank, with all results written."""
        self._ranks.barrier()
        if self._backup:
            self._backup.delete()
        self._ranks.barrier()  # or one might begin to write there again

    def _backing_up(
        self, backup: BackupAndRestore | None, model: keras.Model, data: Any, given: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        if backup is None:
            return contextlib.nullcontext() if self._coordinator else LoopTracker(model, is_backed_up=False).track()
        names = ("batch_size", "class_weight", "initial_epoch", "shuffle", "steps_per_epoch", "validation_split")
        same = {name: given[name] for name in names if name in given}
        same["data"] = compatibility.describe_data(data, given.get("y"))
        drain = functools.partial(self._coordinator.drain, model) if self._coordinator else lambda: None
        peer_preempted = termination.PreemptionListener() if self._coordinator else lambda: False
        return backup.training(model, self._ranks, same, drain, peer_preempted, self.task.name)

    def _watching(self) -> contextlib.AbstractContextManager[None]:
        if self.cluster and self._ranks.size > 1:
            return lost_workers.abort_on_lost_workers(self.cluster, self.task)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def _running(self, model: keras.Model) -> Iterator[None]:
        others = self._coordinator.run_on_workers(model) if self._coordinator else self._watching()
        with self._working(), self.strategy.statistics.caller_marks_changes(), others, warnings.catch_warnings():
            if not self.is_chief:
                warnings.filterwarnings("ignore", message=".*ran out of data")  # the chief says it for all
            try:
                yield
            except SystemExit as e:
                exit_status.exit_code = e.code if isinstance(e.code, int) else int(e.code is not None)
                raise

    def _wrap(self, callbacks: Sequence[keras.callbacks.Callback] | None) -> list[keras.callbacks.Callback]:
        given = arguments.as_list(callbacks)
        for callback in given:
            if isinstance(callback, keras.callbacks.BackupAndRestore) and self._ranks.size > 1:
                raise ConfigError(
                    "keras.callbacks.BackupAndRestore lets every worker overwrite the others' backup and repeats "
                    "steps after a restore; use tfdist.BackupAndRestore."
                )
        return callback_sync.wrap_callbacks(given, self.strategy, self._ranks, self._check_weights)

    def _shown(self, given: dict[str, Any]) -> str | int:
        verbose = given.pop("verbose", "auto")
        if not self.is_chief:
            return 0
        # A bar redraws its line, which only a terminal or a notebook shows as one. What mpirun gives to its tasks only looks like one.
        redraws = "ipykernel" in sys.modules or (sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ)
        return verbose if redraws or verbose not in ("auto", 1) else 2

    def _distribute(self, data: Any, class_weight: dict[int, float] | None = None) -> Any:
        if isinstance(data, types.GeneratorType):
            return generator.from_generator(data)
        if not arguments.is_function(data):
            return data

        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            batches = data(context)
            return batches.map(make_class_weight_map_fn(class_weight)) if class_weight else batches

        if self._coordinator:
            return self._coordinator.placeholder_dataset(dataset)
        return self.strategy.split_batches_from_function(dataset)

    def _check(self, model: keras.Model, method: str = "fit") -> None:
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{method} takes the model first: trainer.{method}(model, x, ...). Received: {type(model).__name__}."
            )
        if model.distribute_strategy is not self.strategy:
            raise ConfigError(
                f"Model {model.name!r} was not built in this trainer's scope: build and compile it in "
                "`with trainer.scope():`."
            )
        unsupported.check_model(model)
        if self._coordinator:
            self._coordinator.attach(model)
        else:
            execution.attach(model, self.compression)


def _check_not_one_of_several(found: tuple[ClusterSpec, TaskSpec] | None, strategy: str) -> None:
    """Raises where this process is one of several that would each train the whole and overwrite the others' files."""
    if found and found[1].type != "evaluator" and len(found[0].training_tasks()) > 1:
        raise ConfigError(
            f"{strategy} trains in one process, but this one is {found[1]} of {len(found[0].training_tasks())} training "
            "tasks; use strategy multi_worker_mirrored, or, for trainings apart from each other, cluster=False "
            "(--config.cluster.source=none)."
        )
