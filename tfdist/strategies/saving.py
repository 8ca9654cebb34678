"""Saving by every rank to one path, so that readers always see complete files.

Files are written beside the path, and replace the existing files once they are complete. So every rank may replace a single
file. A SavedModel and a checkpoint have several files, which must come from one rank: the first rank to arrive writes them, and
the others wait for it.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import inspect
import io
import math
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function
from tfdist.cluster import ClusterSpec, TaskSpec, reachability
from tfdist.compat import keras_internals, laid_out, tf_cluster, tf_internals
from tfdist.compat.split_value import must_save_together
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.folders import storage, temporary
from tfdist.runtime.report.phase import phase
from tfdist.strategies.base import KerasStrategy

Method = Function

_PARTIAL = ".partial"
MARK = "saved_model.pb"  # without it, no program loads a SavedModel
_KNOWN_SECONDS = 60.0  # limit for reading a text that has been published
_FILES = (".weights.h5", ".h5", ".hdf5", ".keras")
# Raised if a parameter server with a variable is lost; these are not errors of the file.
_TASK_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
# This task's saves to a path between two executions.
_saves: collections.Counter[tuple[str, int]] = collections.Counter()


def keras_writer(keras_own: Method) -> Method:
    """Makes `keras_own(saveable, filepath, ...)`, a function of Keras that writes a model or weights, safe on every rank."""
    signature = inspect.signature(keras_own)

    @functools.wraps(keras_own)
    def write(
        saveable: keras.Model | keras.layers.Layer, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        def save(path: str | os.PathLike[str]) -> None:
            with _portable_schedule(saveable):
                outside_of_scopes(keras_own, saveable, path, *args, **kwargs)

        strategy = _strategy_of(saveable)
        if strategy is None or not isinstance(filepath, (str, os.PathLike)) or _PARTIAL in os.fspath(filepath):
            return save(filepath)
        path = os.fspath(filepath)
        has_shards = signature.bind(saveable, filepath, *args, **kwargs).arguments.get("max_shard_size") is not None

        def write_files() -> None:
            if has_shards:
                _save_shards(save, path)
            elif path.endswith(_FILES):
                with beside(path) as partial:
                    if partial.endswith((".h5", ".hdf5")):
                        _check_room(saveable, partial)
                    save(partial)
            elif path.startswith("hf://"):
                save(path)  # Keras uploads it
            else:
                _save_beside(save, path)

        if strategy.trainer and strategy.trainer.write_together(saveable, path, write_files):
            return None
        if any(map(laid_out.is_laid_out, saveable.variables)):
            raise must_save_together(
                "Each worker holds pieces of the model's variables (keras.distribution.ModelParallel)"
            )
        if path.endswith(_FILES) and not has_shards:  # one file, which every rank may replace
            write_files()
        else:
            by_one(strategy, path, write_files, lambda: saveable.variables)
        return None

    return write


@contextlib.contextmanager
def _portable_schedule(saveable: Any) -> Iterator[None]:
    """Replaces a `WarmUp` by the schedule after it, so that a model's file holds only classes that plain Keras loads."""
    optimizer: Any = getattr(saveable, "optimizer", None)
    schedule = None
    if isinstance(optimizer, keras.optimizers.Optimizer):
        schedule = keras_internals.learning_rate(optimizer)
    after = getattr(schedule, "after", None)
    if not isinstance(after, keras.optimizers.schedules.LearningRateSchedule):
        yield
        return
    optimizer.learning_rate = after
    try:
        yield
    finally:
        optimizer.learning_rate = schedule


def _strategy_of(saveable: keras.Model | keras.layers.Layer) -> KerasStrategy | None:
    """Returns the strategy in whose scope a model, or a layer's variables, were made; None if it is not one of tfdist's."""
    values = [keras_internals.raw_value(variable) for variable in getattr(saveable, "variables", ())]
    strategies = (getattr(owner, "distribute_strategy", None) for owner in (saveable, *values))
    return next((strategy for strategy in strategies if isinstance(strategy, KerasStrategy)), None)


def _save_beside(save: Callable[[str], object], path: str) -> None:
    with beside(path) as partial:
        save(partial)


def _save_shards(save: Callable[[str], object], path: str) -> None:
    """Saves sharded weights through a folder beside `path`: the index file names the other files, so their names must not change."""
    if storage.is_url(path):
        with _uploading(path, last=".json") as local:
            save(local)
        return
    partial = f"{path}.{uuid.uuid4().hex[:8]}{_PARTIAL}"
    try:
        tf.io.gfile.makedirs(partial)
        save(os.path.join(partial, os.path.basename(path)))
        names = tf.io.gfile.listdir(partial)
        for name in sorted(names, key=lambda name: name.endswith(".json")):  # the index comes last
            tf.io.gfile.rename(os.path.join(partial, name), os.path.join(os.path.dirname(path), name), overwrite=True)
    except (OSError, tf.errors.OpError) as e:
        raise write_error(path, e) from e
    finally:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.rmtree(partial)


def _check_room(saveable: keras.Model | keras.layers.Layer, path: str) -> None:
    """Raises OSError if a disk lacks space for the weights: after a write to a full disk, HDF5 crashes the process when it exits."""
    bytes_needed = sum(math.prod(weight.shape) * tf.as_dtype(weight.dtype).size for weight in saveable.weights)
    folder = os.path.dirname(path) or "."
    if os.path.isdir(folder) and shutil.disk_usage(folder).free < bytes_needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def model_export(keras_own: Method) -> Method:
    """Returns a `Model.export` that is safe on every rank."""

    @functools.wraps(keras_own)
    def method(model: keras.Model, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        export = functools.partial(outside_of_scopes, keras_own, model)
        if not _is_ours(model, filepath):
            return export(filepath, *args, **kwargs)
        path = os.fspath(filepath)

        def write() -> None:
            with beside(path) as partial, contextlib.redirect_stdout(_Renaming(sys.stdout, partial, path)):
                export(partial, *args, **kwargs)  # prints the path that it has written

        by_one(model.distribute_strategy, path, write, lambda: model.variables)
        return None

    return method


def checkpoints_by_one(strategy: KerasStrategy) -> None:
    """Makes `tf.train.Checkpoint`, its manager and `tf.saved_model.save` write once for all ranks of `strategy`.

    The chief writes the variables of parameter servers, because a server may have another disk.
    """

    def save(own: Callable[[str], object], prefix: str, objects: Callable[[], Iterable[object]]) -> Any:
        if _PARTIAL in prefix:  # belongs to a SavedModel that is being written
            return own(prefix)
        by_one(strategy, prefix, lambda: _save_beside(own, prefix), objects)
        return tf.constant(prefix)

    def save_model(own: Callable[[str], object], folder: str, objects: Callable[[], Iterable[object]]) -> Any:
        if _PARTIAL in folder:
            return own(folder)
        save = functools.partial(outside_of_scopes, own)
        return by_one(strategy, folder, lambda: _save_beside(save, folder), objects)

    device = "/job:chief/task:0/device:CPU:0" if strategy.traits.asynchronous else None
    tf_internals.replace_checkpoint_writer(save, device)
    tf_internals.replace_saved_model_writer(save_model)


def by_one(
    strategy: KerasStrategy, path: str, write: Callable[[], None], objects: Callable[[], Iterable[object]] = tuple
) -> None:
    """Calls `write` on the first task to arrive; the others wait for it. A task that does not find these files writes its own.

    No task waits for a task that does not save, so one task may save alone. Moving statistics are the exception: after a
    custom loop each replica has its own value, and all tasks must take part in their average: `objects` returns the saved objects, which
    are searched for them.
    """
    with phase("saving"):
        if strategy.cluster_task is None:
            return write()
        return _by_first(strategy, strategy.cluster_task, path, write, objects)


def _by_first(
    strategy: KerasStrategy,
    cluster_task: tuple[ClusterSpec, TaskSpec],
    path: str,
    write: Callable[[], None],
    objects: Callable[[], Iterable[object]],
) -> None:
    strategy.statistics.show_shared()
    # `saved` may be a Keras variable, or the TensorFlow variable in it, whose `value` is a method.
    if any(saved in strategy.statistics or getattr(saved, "value", None) in strategy.statistics for saved in objects()):
        strategy.statistics.synchronize()
    cluster, task = cluster_task
    tasks = cluster.training_tasks()
    if not storage.is_url(path):
        path = os.path.abspath(path)
    # All tasks compute the same key: the number of their save to this path between two executions.
    when = path, strategy.executions
    _saves[when] += 1
    key = f"tfdist/saved/{strategy.executions}/{_saves[when]}/{path}"
    try:
        tf_cluster.publish(key, str(tasks.index(task)))
    except tf.errors.AlreadyExistsError:
        # Another task is the first. If it has ended, or has another disk, this task writes its own files.
        files = _wait_for_first(cluster, key)
        if not files or files != _files_at(path):
            write()
        return None
    except tf.errors.OpError:  # the task that stores the texts has ended
        return write()
    try:
        write()
    finally:
        with contextlib.suppress(tf.errors.OpError):  # also after an error, because the others wait
            tf_cluster.publish(f"{key}/done", _files_at(path))
    return None


def _wait_for_first(cluster: ClusterSpec, key: str) -> str:
    """Returns the files that the first task has written; an empty text if it ended before, or wrote no files."""
    missed = 0
    with contextlib.suppress(tf.errors.OpError):
        # The text is published, so only a busy chief answers late. Two tasks that write at once would mix their files.
        first = cluster.training_tasks()[int(tf_cluster.published(key, _KNOWN_SECONDS))]
        while missed < 2:  # one miss may be a delay of the network
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                return tf_cluster.published(f"{key}/done", 1.0)
            ended = reachability.unreachable_tasks(cluster, [first], serving=True).get(first) in reachability.ENDED
            missed = missed + 1 if ended else 0
    return ""


def _files_at(path: str) -> str:
    """Returns names, sizes and times of the files of a folder or a checkpoint; empty if there are no files."""
    if storage.is_url(path):
        folder, name = os.path.split(path)
        below = {file: size for file, size in storage.list_files(folder).items() if file.startswith(name)}
        return " ".join(f"{file}:{size}" for file, size in sorted(below.items()))
    paths = [f"{path}.index", path]
    if tf.io.gfile.isdir(path):
        paths = [os.path.join(path, name) for name in tf.io.gfile.listdir(path)]
    described = []
    for name in sorted(paths):
        with contextlib.suppress(tf.errors.NotFoundError):
            stat = tf.io.gfile.stat(name)
            described.append(f"{name}:{stat.length}:{stat.mtime_nsec}")
    return " ".join(described)


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a path beside `path`; a file, folder or checkpoint written to it replaces the one at `path`.

    Each file is replaced atomically, so that a reader never sees an incomplete file, whichever tasks write it. For a URL the path is
    in a temporary folder, whose files are uploaded at the end.

    Raises:
        WriteError: The path cannot be written. In a temporary folder, which is not read, one warning is logged instead.
    """
    path = os.fspath(path).rstrip("/")
    if storage.is_url(path):
        with _uploading(path) as local:
            yield local
        return
    suffix = next((ending for ending in _FILES if path.endswith(ending)), os.path.splitext(path)[1])
    partial = f"{path.removesuffix(suffix)}.{uuid.uuid4().hex[:8]}{_PARTIAL}{suffix}"
    try:
        with phase("saving"):
            yield partial
        for written in sorted(_beginning_with(partial)):  # a checkpoint's index comes after its data
            _put(written, path + written.removeprefix(partial))
    except _TASK_ERRORS:
        raise
    except (OSError, tf.errors.OpError) as e:
        if not temporary.warn_if_temporary(path, e):
            raise write_error(path, e) from e
    finally:
        for old_path in _beginning_with(partial):
            remove = tf.io.gfile.rmtree if tf.io.gfile.isdir(old_path) else tf.io.gfile.remove
            with contextlib.suppress(tf.errors.OpError):
                remove(old_path)


@contextlib.contextmanager
def _uploading(path: str, last: str = MARK) -> Iterator[str]:
    """Yields a local path; a file, folder or checkpoint written to it is uploaded to the URL `path`.

    The file at the top whose name ends with `last` marks the others as complete: of a folder that exists it is removed first, and it is
    uploaded last. After an interrupted upload no program loads the mixture.
    """
    url, name = os.path.split(path)
    try:
        with temporary.temporary_folder() as folder:
            # Keras' writers in `save` see that they write to a partial file.
            written = os.path.join(folder, _PARTIAL)
            os.mkdir(written)
            with phase("saving"):
                yield os.path.join(written, name)
            files = [
                os.path.relpath(os.path.join(parent, file), written)
                for parent, _, names in os.walk(written)
                for file in names
            ]
            # A checkpoint's index comes after its data.
            files.sort(key=lambda file: (file.endswith(last), -file.count("/"), file))
            if any("/" in file for file in files):
                storage.with_retries(lambda: storage.remove(f"{path}/{last}"))
            for file in files:
                storage.with_retries(functools.partial(storage.upload, os.path.join(written, file), f"{url}/{file}"))
    except _TASK_ERRORS:
        raise
    except WriteError:
        raise
    except (OSError, tf.errors.OpError) as e:
        raise write_error(path, e) from e


def make_folder(path: str) -> None:
    """Creates the folder of a path that is saved to. Raises WriteError if it cannot be created."""
    try:
        storage.make_folder(os.path.dirname(path) or ".")
    except OSError as e:
        raise write_error(path, e) from e


def write_error(path: str, error: BaseException) -> WriteError:
    """Returns the error for a path that could not be saved to."""
    if storage.is_url(path) and isinstance(error, (storage.StorageError, FileNotFoundError)):
        return WriteError(
            f"{storage.reason(error)}. Nothing was replaced by an incomplete file. Fix the storage, and save again."
        )
    return WriteError(
        f"cannot write {path}: {write_error_reason(error)}. The old file is unchanged. Free the disk or choose another path, and save again."
    )


def _beginning_with(prefix: str) -> list[str]:
    folder, name = os.path.split(prefix)
    if not tf.io.gfile.isdir(folder or "."):
        return []
    names = (name_in_folder.rstrip("/") for name_in_folder in tf.io.gfile.listdir(folder or "."))
    return [os.path.join(folder, name_in_folder) for name_in_folder in names if name_in_folder.startswith(name)]


def _put(written: str, path: str) -> None:
    """Replaces the file or folder at `path`; a folder file by file, top-level files last, because they imply the others.

    A new folder appears atomically.
    """
    if not tf.io.gfile.isdir(written):
        tf.io.gfile.rename(written, path, overwrite=True)
        return
    with contextlib.suppress(tf.errors.OpError):  # the folder exists
        tf.io.gfile.rename(written, path)
        return
    for folder, _, files in tf.io.gfile.walk(written, topdown=False):
        target = path + folder.rstrip("/").removeprefix(written)
        tf.io.gfile.makedirs(target)
        for name in sorted(files):
            tf.io.gfile.rename(os.path.join(folder, name), os.path.join(target, name), overwrite=True)


class _Renaming(io.TextIOBase):
    """A text stream that writes to `out` and replaces one name by another."""

    def __init__(self, out: Any, name: str, shown: str):
        self._out = out
        self._name = name
        self._shown = shown

    def write(self, text: str) -> int:
        self._out.write(text.replace(self._name, self._shown))
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def _is_ours(model: keras.Model, filepath: str | os.PathLike[str]) -> bool:
    return isinstance(model.distribute_strategy, KerasStrategy) and isinstance(filepath, (str, os.PathLike))


def outside_of_scopes(function: Method, *args: Any, **kwargs: Any) -> Any:
    """Calls `function` outside of any strategy's scope, and returns its result.

    When Keras saves a model, it creates a second optimizer. In the scope of several workers its variables would be broadcast
    to the other workers, which may not be saving.
    """
    if not tf.distribute.has_strategy():
        return function(*args, **kwargs)
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=call, name="outside_of_scopes")  # scopes are local to a thread
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
