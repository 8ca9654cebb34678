"""The callback `TensorBoard`: after a resume its curves continue as if the training had not been interrupted."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Logs
from tfdist.compat import optimizer_search
from tfdist.config.monitoring import step_range
from tfdist.errors import ConfigError, format_value
from tfdist.gradients.optimizer import get_compressor
from tfdist.monitoring import side_summaries, slow_tasks
from tfdist.monitoring.event_files import BY_ITERATIONS, Run
from tfdist.monitoring.meter import (
    CompressionMeter,
    ExecutionMeter,
    FaultMeter,
    GoodputMeter,
    GradientNorm,
    Meter,
    SizeMeter,
    SkipMeter,
    SystemMeter,
    WireMeter,
)
from tfdist.monitoring.throughput import Throughput
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.uploads import UploadedFolder
from tfdist.runtime.log import logger

_Result = TypeVar("_Result")


class TensorBoard(keras.callbacks.Callback):
    """Callback that writes a training's scalars for TensorBoard; pass it to `fit` on every worker.

    The chief writes two runs with the same tags as `keras.callbacks.TensorBoard`. `train` has `epoch_*` and
    `epoch_learning_rate` by epoch, and by step `batch_*`, `batch_learning_rate`, `perf/examples_per_second` and
    `perf/step_ms` (the median since the last value, without the first execution of each process, which compiles).
    `validation` has `epoch_*`, and `evaluation_*_vs_iterations` by the optimizer's iterations. Each other worker writes
    `perf/*` to a run named after its task, such as `worker-1`. Every task also writes by step the tags of `comm/*`,
    `ps/*`, `faults/*` and `system/*` that it can measure; the table in docs/monitoring.md explains each tag, and when it is absent.

    Besides curves, `train` has texts (cluster, strategy, versions), and a first page for the tab "Custom Scalars". With
    `hparams`, the run `hparams` has the hyperparameters for the tab "HParams", and `final/*`, the last epoch's logs.

    A training that resumes from a `BackupAndRestore` continues the same curves: values written after the backup are
    removed. A training that begins with epoch 0 renames the files of an earlier training in `log_dir`, so that TensorBoard no longer
    shows them. If the folder cannot be written, the callback warns once and writes no more curves; the training continues.

    Args:
        log_dir: The folder, or its URL (`s3://bucket/logs`); only for this training, and the same on all workers. The files for a URL are
            written to a local folder, and uploaded at the end of each epoch and of `fit`. A failing upload logs a warning and is tried again.
        update_freq: Number of steps between two writes of the values by step; "batch" means 1, and "epoch" means no values by step.
        global_batch_size: Examples per step over all replicas. None means the batch size of the data of `Trainer.fit`;
            if it is unknown, `perf/examples_per_second` is not written.
        hparams: Hyperparameters, names to values; a group is a nested dict.
        profile_steps: The steps to profile on each worker: first and last as "20:25", or one step. Steps are counted over the complete
            training, also after a resume. The profile is in `plugins/profile` of the worker's run.
        gradient_norm: Whether to write `train/gradient_norm` by step. Each step then computes the norm.
        histogram_freq: Number of epochs between two histograms of the weights, which the chief writes. 0 means never.

    Attributes:
        log_dir: The folder.
        global_batch_size: Examples per step, or None.
        fit_batch_size: The global batch size of the current `fit`.

    Examples:
        >>> import tempfile
        >>> from tfdist.monitoring import TensorBoard
        >>> callback = TensorBoard(tempfile.mkdtemp(), hparams={"units": 8})  # fit(..., callbacks=[callback])
    """

    only_observes = True  # changes no training state, so ranks need not agree after each step

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        update_freq: int | str = 10,
        global_batch_size: int | None = None,
        hparams: Mapping[str, Any] | None = None,
        profile_steps: str = "",
        gradient_norm: bool = False,
        histogram_freq: int = 0,
    ):
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        if faults := list(storage.faults("log_dir of TensorBoard", self.log_dir)):
            raise ConfigError(faults)
        self.global_batch_size = global_batch_size
        self.fit_batch_size: int | None = None
        self._hparams = hparams
        self._profiler = StepProfiler(step_range("profile_steps of TensorBoard", profile_steps))
        every = {"batch": 1, "epoch": 0}.get(str(update_freq), update_freq)
        if not isinstance(every, int) or every < 0 or update_freq == 0:
            raise ConfigError(
                "update_freq of TensorBoard must be a number of steps from 1, 'batch' or 'epoch'. "
                f"Received: {format_value(update_freq)}."
            )
        if isinstance(histogram_freq, bool) or not isinstance(histogram_freq, int) or histogram_freq < 0:
            raise ConfigError(
                "histogram_freq of TensorBoard must be a number of epochs from 1, or 0 for none. "
                f"Received: {format_value(histogram_freq)}."
            )
        self._every = every  # 0 means never
        self._histogram_freq = histogram_freq
        self._meters: list[Meter] = [SystemMeter(), FaultMeter(), SizeMeter(), GoodputMeter()]
        self._meters += [
            WireMeter(),
            CompressionMeter(),
            ExecutionMeter(),
            SkipMeter(),
            *[GradientNorm()] * gradient_norm,
        ]
        self._throughput = Throughput(0)
        self._runs: dict[str, Run] = {}
        self._executions = 0  # of this training in this process
        self._is_listed = False  # whether the tab "HParams" lists this training
        self._first_rate: Any = None  # the learning rate of the first step
        self._uploads: UploadedFolder | None = None  # if `log_dir` is a URL
        self._folder = ""  # of the files: `log_dir`, or the local folder for a URL
        self._local_run = ""  # the run with the measurements of this task
        self._is_chief = True
        self._owns_files = False  # whether the files in the runs belong to this training
        self._can_write = True
        self._sizes: dict[str, dict[str, int]] = {}  # sizes to which the files are truncated before the next write

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, and creates the runs of this process's task."""
        super().set_model(model)
        self._strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
        resolver = getattr(self._strategy, "cluster_resolver", None)
        names = ["train", "validation", "hparams"]
        if resolver and not self._strategy.extended.should_save_summary:
            self._is_chief, names = False, [f"{resolver.task_type}-{resolver.task_id}"]
        self._local_run = names[0]
        if storage.is_url(self.log_dir) and self._uploads is None:
            own = tuple(f"{name}/" for name in names)
            try:
                self._uploads = UploadedFolder(self.log_dir.rstrip("/"), lambda path: path.startswith(own))
            except OSError as e:
                raise ConfigError(
                    f"log_dir must be a folder that can be read and written: {storage.reason(e)}."
                ) from None
        self._folder = str(self._uploads.folder) if self._uploads else self.log_dir
        self._runs = {name: self._runs.get(name) or Run(os.path.join(self._folder, name)) for name in names}
        for meter in self._meters:
            meter.begin(model, self._is_chief)

    def _try(self, action: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Calls a function that writes files; does nothing after the first error."""
        if not self._can_write:
            return None
        try:
            return action(*arguments)
        except (tf.errors.OpError, OSError) as e:
            self._can_write = False
            logger.warning(
                f"TensorBoard: nothing more is written to {self.log_dir!r}, while the training continues "
                f"({getattr(e, 'message', None) or e}). Give it a log_dir with free space that this process may write to."
            )
            return None

    def _write(self, run: str, values: dict[str, Any], step: int) -> None:
        self._cut()
        self._try(self._runs[run].write, {tag: float(value) for tag, value in values.items() if is_number(value)}, step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a backup: the steps done, and the sizes of the files."""
        sizes = self._try(lambda: {name: run.sizes() for name, run in self._runs.items()})
        return {"throughput": self._throughput.state_dict(), "sizes": sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`; values written after it are removed before the next write."""
        self._throughput.load_state_dict(state["throughput"])
        self._owns_files = True
        # Truncate at the next write: if this training is already complete, the files may hold values of the program's next training.
        self._sizes = state["sizes"] or {}

    def _cut(self) -> None:
        sizes, self._sizes = self._sizes, {}
        for name in sizes.keys() & self._runs.keys():
            self._try(self._runs[name].cut, sizes[name])

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._cut()
        if not self._owns_files:
            self._begin(epoch)
        if self._first_rate is None:
            self._first_rate = self._learning_rate().get("learning_rate")
        self._throughput.on_epoch_begin(epoch)
        for meter in self._meters:
            meter.on_epoch_begin()

    def _begin(self, epoch: int) -> None:
        """Starts the curves of a training that was not resumed."""
        self._owns_files = True
        self._executions, self._is_listed, self._first_rate = 0, False, None
        if epoch == 0:
            self._throughput.steps = 0
            for run in self._runs.values():
                self._try(run.set_aside)
        elif not self._throughput.steps:  # for example, an earlier process trained the first epochs
            self._throughput.steps = self._iterations() or 0
        if self._is_chief and not self._try(self._runs["train"].sizes):
            self._describe()

    def _describe(self) -> None:
        """Writes the texts and the layout of the charts, and flushes, so that a backup's file sizes include them."""
        compresses = any(get_compressor(optimizer) for optimizer in optimizer_search.optimizers(self.model))
        for summary in (
            side_summaries.environment_texts(self._strategy),
            side_summaries.charts_layout(self._every > 0, compresses, slow_tasks.has_own_times(self._strategy)),
        ):
            self._try(self._runs["train"].write_summary, summary)
        self._flush()

    def _start_runs(self) -> None:
        """Starts another worker's run after the first execution in its process, and lists `hparams` on the chief after the second.

        TensorBoard assigns colors to runs in the order of their first events, so the workers' runs get the first colors. The order holds
        because a step ends on all tasks before the next step ends on any task.
        """
        self._executions += 1
        if not self._is_chief and self._executions == 1:
            self._try(self._runs[self._local_run].start)
        if self._executions == 2:
            self._list_hparams()

    def _list_hparams(self) -> None:
        """Lists the training in the tab "HParams" once. After a resume, the files of `hparams` show that it is listed already."""
        if self._is_listed or not self._is_chief or self._hparams is None:
            return
        self._is_listed = True
        if not self._try(self._runs["hparams"].sizes):
            batch_size = self.global_batch_size or self.fit_batch_size
            start = side_summaries.hparams_start(self._hparams, self._strategy, batch_size, self._first_rate)
            self._try(self._runs["hparams"].write_summary, start)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._profiler.is_off:
            return
        folder, steps = os.path.join(self._folder, self._local_run), getattr(self.model, "steps_per_execution", 1)
        self._try(self._profiler.before_execution, folder, self._throughput.steps, steps)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before = self._throughput.steps
        self._throughput.set_params(self.params)
        self._throughput.on_train_batch_end(batch)
        step = self._throughput.steps
        self._try(self._profiler.after_execution, step)
        self._start_runs()
        for meter in self._meters:
            meter.on_step(step)
        if not self._can_write or not self._every or step // self._every == before // self._every:
            return
        values = self._measured()
        if self._is_chief:
            values |= {f"batch_{name}": value for name, value in {**(logs or {}), **self._learning_rate()}.items()}
        self._write(self._local_run, values, step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._every:
            self._write(self._local_run, self._measured(), self._throughput.steps)
        if self._is_chief and logs:
            validation = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
            training = {name: value for name, value in logs.items() if not name.startswith("val_")}
            for run, values in (("train", training | self._learning_rate()), ("validation", validation)):
                self._write(run, {f"epoch_{name}": value for name, value in values.items()}, epoch)
        if self._is_chief and self._histogram_freq and epoch % self._histogram_freq == 0:
            self._try(self._runs["train"].write, side_summaries.weight_histograms(self.model), epoch)
        self._flush()
        if self._uploads:
            self._uploads.upload()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._executions:  # within `fit`, so that `hparams` has its first events before `validation`
            self._list_hparams()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_chief and (iterations := self._iterations()) is not None:
            values = {BY_ITERATIONS.format(name=name): value for name, value in (logs or {}).items()}
            self._write("validation", values, iterations)
        self._flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._list_hparams()
        self._owns_files = False
        self._try(self._profiler.stop)
        if logs and self._is_chief and self._hparams is not None:
            self._write("hparams", {f"final/{name}": value for name, value in logs.items()}, self._throughput.steps)
            self._try(self._runs["hparams"].write_summary, side_summaries.hparams_end())
        for run in self._runs.values():
            self._try(run.close)
        if self._uploads:
            self._uploads.finish()

    def _flush(self) -> None:
        for run in self._runs.values():
            self._try(run.flush)

    def _measured(self) -> dict[str, Any]:
        """Returns the measurements since the last call."""
        measured = self._throughput
        measured.global_batch_size = self.global_batch_size or self.fit_batch_size or 0
        values = {
            "perf/examples_per_second": measured.examples_per_second or None,
            "perf/step_ms": 1000 * statistics.median(measured.step_seconds) if measured.step_seconds else None,
        }
        measured.step_seconds.clear()
        for meter in self._meters:
            values |= meter.read()
        return values

    def _learning_rate(self) -> dict[str, Any]:
        optimizer = getattr(self.model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # that of a LossScaleOptimizer
        rate = getattr(optimizer, "learning_rate", None)
        return {} if rate is None else {"learning_rate": keras.ops.convert_to_numpy(rate)}

    def _iterations(self) -> int | None:
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        return None if iterations is None else int(keras.ops.convert_to_numpy(iterations))


class StepProfiler:
    """Runner of TensorFlow's profiler during the executions that contain a step of a range.

    Args:
        steps: The first and the last step of the whole training, counted from 1; None means that nothing is profiled.
    """

    def __init__(self, steps: tuple[int, int] | None):
        self._first, self._last = steps or (1, 0)
        self._is_running = False

    @property
    def is_off(self) -> bool:
        """True if no further step is to be profiled."""
        return self._last == 0

    def before_execution(self, folder: str, done: int, steps: int) -> None:
        """Starts the profiler if the next execution contains a step of the range.

        Args:
            folder: The folder of a run of TensorBoard.
            done: Number of the training's steps before the execution.
            steps: Number of steps in the execution.
        """
        if not self._is_running and done < self._last and done + steps >= self._first:
            try:
                tf.profiler.experimental.start(folder)
                self._is_running = True
            except tf.errors.AlreadyExistsError:
                self._give_up()

    def after_execution(self, done: int) -> None:
        """Stops the profiler after the last step of the range."""
        if done >= self._last:
            self.stop()

    def stop(self) -> None:
        """Stops the profiler, if it runs, and writes the profile.

        Raises:
            tf.errors.OpError: The profile cannot be written.
        """
        is_running, self._is_running = self._is_running, False
        if is_running:
            try:
                tf.profiler.experimental.stop()
            except tf.errors.UnavailableError:
                self._give_up()

    def _give_up(self) -> None:
        logger.warning(
            f"TensorBoard: there is no profile of steps {self._first} to {self._last}, as another profiler runs in this process."
        )
        self._last = 0


def is_number(value: Any) -> bool:
    """Returns whether a value of the logs is a single number, which a curve can show."""
    array = np.asarray(value)
    return array.ndim == 0 and array.dtype.kind not in "OSU"  # O is objects, such as None; S and U are texts
