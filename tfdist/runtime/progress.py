"""Files through which tasks and the supervisor that started them exchange progress. No TensorFlow here.

They share a folder, named by an environment variable. Each task writes its step, its epoch, the step of the last backup and its last
metrics there, and marks, for example for a created strategy or rejected backups. The supervisor writes the numbers of restarts and lost steps.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import numbers
import os
import pathlib
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tfdist.runtime.files import open_own, read_file, write_error_reason
from tfdist.runtime.log import logger
from tfdist.runtime.phase import main as phases

FOLDER = "TFDIST_PROGRESS"
LAUNCHED = "TFDIST_LAUNCHED"  # the start time of the supervisor, in seconds since the epoch
REPLICAS = "TFDIST_REPLICAS"  # the replicas of all workers together, where the number of workers may change
_FORM = struct.Struct("<5q16s")
_METRICS_BYTES = 512  # after the numbers: lines `name value`; lines that do not fit are dropped
_RESTARTS = "restarts"
_STRATEGY = "strategy"
_LOST = "lost_steps"  # the step before the restart, until the repeated steps are counted; and the number of repeated steps so far
_REFUSAL = "refusal"
_BACKED_UP = "backed_up"
_FILES = "files"  # a folder for temporary files of tasks
_OF_ALL = (_RESTARTS, _STRATEGY, _LOST, _REFUSAL, _BACKED_UP, _FILES)
_EVALUATOR = "evaluator-"  # prefix of the names of tasks that do not train
_FINISHED = "finished-"
_TRAINING = "training-"
_LOST_TASK = "lost-"
_BACKUP = "backup-"  # prefix of the files that stand for folders with backups
REUSED = ".reused"  # suffix: this run has removed the folder's backups, and may run another training in it
_NUMBERS = 40  # bytes of a file of numbers; it is overwritten in place, so that a full disk keeps the previous numbers

_has_warned = False
_mine: Steps | None = None  # of this process, as last written


class Steps(NamedTuple):
    """The progress of a task.

    Attributes:
        done: Training steps completed.
        saved: The step of the last backup, from which a restart continues; 0 without a backup.
        epoch: The epoch, from 1; 0 if unknown.
        epochs: The last epoch; 0 if unknown.
        total: The step at which the training will end; 0 if unknown.
        activity: As in `phase.Phase`.
    """

    done: int
    saved: int
    epoch: int = 0
    epochs: int = 0
    total: int = 0
    activity: str = ""


class Loss(NamedTuple):
    """The report of a task that ends because of another task.

    Attributes:
        task: The other task, such as `worker:1`; several are separated by commas.
        cause: The sentence that names it, without a full stop and a remedy.
        remedy: The remedy, or an empty text if it is another start of all tasks.
    """

    task: str
    cause: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}" if self.remedy else self.cause


class Progress:
    """The file with a task's progress; does nothing without a supervisor.

    Args:
        name: The task's name, as `worker-1`.
    """

    def __init__(self, name: str):
        self._file: int | None = None
        if folder := _folder():
            with _warning_once():
                self._file = open_own(pathlib.Path(folder, name), os.O_WRONLY)
        self._steps = Steps(0, 0)
        self._metrics: dict[str, str] = {}
        phases.readers["progress"] = lambda activity: self.write(activity=activity)

    def write(
        self,
        done: int | None = None,
        saved: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        **changed: Any,
    ) -> None:
        """Publishes changed values, by the names of `Steps`; cheap enough for every step.

        Args:
            done: As in `Steps`; a smaller number than before begins another training.
            saved: As in `Steps`.
            metrics: The training's logs: numbers by name. Other metrics keep their last value.
            **changed: The other fields of `Steps`.
        """
        before, shown = self._steps, self._metrics
        if done is not None and done < before.done:
            self._metrics = {}
        if metrics:
            texts = {name: f"{value:.4g}" for name, value in metrics.items() if isinstance(value, numbers.Real)}
            self._metrics = {**self._metrics, **texts}
        changed["done"] = before.done if done is None else done
        changed["saved"] = before.saved if saved is None else saved
        global _mine
        self._steps = _mine = before._replace(**changed)
        if self._file is not None and (self._steps != before or self._metrics != shown):
            with _warning_once():
                os.pwrite(self._file, _pack(self._steps) + _pack_metrics(self._metrics), 0)

    def touch(self) -> None:
        """Updates the file's time, to show that the task is working."""
        if self._file is not None:
            with _warning_once():
                os.utime(self._file)


def mark_strategy() -> None:
    """Marks that this task has created a strategy; does nothing without a supervisor."""
    _mark(_STRATEGY)


def mark_finished(name: str) -> None:
    """Marks that a task, such as `worker-1`, has finished its training; does nothing without a supervisor."""
    _mark(f"{_FINISHED}{name}")


@contextlib.contextmanager
def training(name: str) -> Iterator[None]:
    """Marks that a task, such as `worker-1`, trains within the context; does nothing without a supervisor.

    The mark stays if the process ends within the context without Python's shutdown, as by `os._exit`.
    """
    _mark(mark := f"{_TRAINING}{name}")
    atexit.register(_unmark, mark)  # a generator with a custom loop may never be closed
    try:
        yield
    finally:
        atexit.unregister(_unmark)
        _unmark(mark)


def mark_backed_up() -> None:
    """Marks that this task's training is backed up; does nothing without a supervisor."""
    _mark(_BACKED_UP)


def mark_refusal() -> None:
    """Marks that this task ends because its backups cannot be used, also after a restart; does nothing without a supervisor."""
    _mark(_REFUSAL)


def mark_lost(name: str, loss: Loss) -> None:
    """Marks that a task, such as `worker-0`, ends because of another task; does nothing without a supervisor.

    The supervisor then reports the other task, and does not show the errors of this one: its log has them.
    """
    if folder := _folder():
        with _warning_once():
            pathlib.Path(folder, f"{_LOST_TASK}{name}").write_bytes("\n".join(loss).encode())


def shown_cause(error: BaseException) -> BaseException | None:
    """Returns the cause for `raise ... from`: `error`, or None where its traceback would hide the clear message from the user.

    The log of a supervised task keeps the traceback. Without a supervisor, the level DEBUG of the logger "tfdist" shows it.
    """
    return error if is_supervised() or logger.isEnabledFor(logging.DEBUG) else None


def _mark(name: str) -> None:
    if folder := _folder():
        with _warning_once():
            pathlib.Path(folder, name).touch()


def _unmark(name: str) -> None:
    if folder := _folder():
        with _warning_once():
            pathlib.Path(folder, name).unlink(missing_ok=True)


def _folder() -> str | None:
    """Returns the folder that this task shares with its supervisor; None without a supervisor."""
    folder = os.environ.get(FOLDER)
    return folder if folder and os.path.isdir(folder) else None


def note_backup(backup_dir: str, exists: bool = True) -> None:
    """Records for this task's next process whether a folder has a backup; does nothing without a supervisor."""
    if note := backup_note(backup_dir):
        with _warning_once():
            if exists:
                note.touch()
            else:
                note.unlink(missing_ok=True)
                note.with_name(note.name + REUSED).touch()


def had_backup(backup_dir: str) -> bool:
    """Returns whether this run has recorded, before a restart or since, that a folder has a backup."""
    note = backup_note(backup_dir)
    return bool(note and note.exists())


def backup_note(backup_dir: str) -> pathlib.Path | None:
    """Returns the file that stands for a folder of backups; None without a supervisor."""
    folder = _folder()
    if folder is None:
        return None
    path = backup_dir if "://" in backup_dir else os.path.abspath(backup_dir)
    return pathlib.Path(folder, f"{_BACKUP}{zlib.crc32(path.encode(errors='surrogateescape')):08x}")


def task_files() -> str | None:
    """Returns the folder for temporary files of this task, which the supervisor removes; None without a supervisor.

    Raises:
        OSError: The folder cannot be created.
    """
    folder = _folder()
    if folder is None:
        return None
    path = os.path.join(folder, _FILES)
    os.makedirs(path, exist_ok=True)
    return path


def is_supervised() -> bool:
    """Returns whether a supervisor has started this process."""
    return FOLDER in os.environ


def launched() -> float:
    """Returns the start time of the supervisor, by `time.time()`; 0 without a supervisor."""
    return float(os.environ.get(LAUNCHED) or 0)


def restarts() -> int:
    """Returns the number of times that the supervisor has restarted this run or one of its tasks; 0 without a supervisor."""
    try:
        return int(read_file(pathlib.Path(os.environ[FOLDER], _RESTARTS)))
    except (KeyError, OSError, ValueError):
        return 0


def settle_lost_steps() -> int | None:
    """Returns the number of steps that the run has repeated after restarts so far; None without a supervisor or a backup.

    One task calls it after its first step, before it writes its progress: then `Progress` still has the step from which it continues.
    """
    folder = _folder()
    begun = min((steps.done for steps in _read_all(folder)), default=None) if folder else None
    if folder is None or begun is None:
        return None
    reached, lost = _lost_steps(folder)
    lost += max(reached - begun, 0)
    with _warning_once():
        _write_numbers(folder, _LOST, 0, lost)
    return lost


def read(folder: str | os.PathLike[str], name: str) -> Steps | None:
    """Returns a task's progress, or None if it has not written any."""
    try:
        done, saved, epoch, epochs, total, activity = _FORM.unpack_from(read_file(pathlib.Path(folder, name)))
    except (OSError, struct.error):
        return None
    return Steps(done, saved, epoch, epochs, total, activity.rstrip(b"\0").decode())


def read_metrics(folder: str | os.PathLike[str], name: str) -> dict[str, str]:
    """Returns a task's last metrics, as texts by name: `{"loss": "0.1234"}`; empty if it has not written any."""
    try:
        content = read_file(pathlib.Path(folder, name))[_FORM.size :]
    except OSError:
        return {}
    lines = content.rstrip(b"\0").decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines) if name}


def _pack(steps: Steps) -> bytes:
    *values, activity = steps
    return _FORM.pack(*values, activity.encode())


def _pack_metrics(metrics: Mapping[str, str]) -> bytes:
    """Returns the lines of metrics, always of the same size."""
    packed = b""
    for name, value in metrics.items():
        line = f"{name} {value}\n".encode(errors="replace")
        if len(packed) + len(line) > _METRICS_BYTES:
            break
        packed += line
    return packed.ljust(_METRICS_BYTES, b"\0")


def touched(folder: str | os.PathLike[str], name: str) -> float:
    """Returns the time of a task's last report, by `time.time()`; 0 without a report."""
    try:
        return os.path.getmtime(os.path.join(folder, name))
    except OSError:
        return 0.0


def has_finished(folder: str | os.PathLike[str], name: str) -> bool:
    """Returns whether a task has finished its training."""
    return pathlib.Path(folder, f"{_FINISHED}{name}").exists()


def is_training(folder: str | os.PathLike[str], name: str) -> bool:
    """Returns whether a task trains, or has ended during its training without Python's shutdown."""
    return pathlib.Path(folder, f"{_TRAINING}{name}").exists()


def read_loss(folder: str | os.PathLike[str], name: str) -> Loss | None:
    """Returns the loss of another task because of which a task ends, or None if it has not reported any."""
    try:
        return Loss(*read_file(pathlib.Path(folder, f"{_LOST_TASK}{name}")).decode(errors="replace").split("\n"))
    except (OSError, TypeError):
        return None


def has_refusal(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task has rejected its backups."""
    return pathlib.Path(folder, _REFUSAL).exists()


def is_backed_up(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task's training is backed up."""
    return pathlib.Path(folder, _BACKED_UP).exists()


def how_to_continue(saved: int | None) -> str:
    """Returns the advice after an interrupted training; `saved` is the last backup's step, 0 without a backup, or None if unknown."""
    if saved is None:
        return "Run the same command again to continue from the chief's last backup, if there is one"
    if saved:
        return f"Run the same command again to continue from step {saved}"
    return "There is no backup, so nothing is kept: the same command starts from the beginning"


def how_to_continue_mine() -> str:
    """Returns the advice for this process, after a full stop; empty if it has not trained, or a supervisor prints the advice."""
    return "" if _mine is None or is_supervised() else f". {how_to_continue(_mine.saved)}"


def uses_tfdist(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task has created a strategy, or trained."""
    names = (path.name for path in pathlib.Path(folder).iterdir())
    return any(name not in (_RESTARTS, _LOST) and not name.startswith(_BACKUP) for name in names)


def clear(folder: str | os.PathLike[str], restarts: int) -> None:
    """Removes the tasks' progress before a restart; writes the number of restarts and the largest step reached for the next processes.

    Raises:
        OSError: A file cannot be written or removed.
    """
    reached, lost = _lost_steps(folder)
    reached = max([reached, *(steps.done for steps in _read_all(folder))])
    for path in pathlib.Path(folder).iterdir():
        if path.name == _FILES:  # left by killed tasks
            shutil.rmtree(path, ignore_errors=True)
        # The evaluator keeps running, backups stay, and files of numbers are overwritten.
        elif not path.name.startswith((_EVALUATOR, _BACKUP)) and path.name not in (_RESTARTS, _LOST):
            path.unlink()
    _write_numbers(folder, _LOST, reached, lost)
    write_restarts(folder, restarts)


def write_restarts(folder: str | os.PathLike[str], restarts: int) -> None:
    """Writes the number of restarts for the tasks.

    Raises:
        OSError: The file cannot be written.
    """
    _write_numbers(folder, _RESTARTS, restarts)


def _read_all(folder: str | os.PathLike[str]) -> list[Steps]:
    """Returns the progress of each task; a task that has not written any counts as at its begin."""
    names = [
        path.name
        for path in pathlib.Path(folder).iterdir()
        if path.name not in _OF_ALL
        and not path.name.startswith((_EVALUATOR, _BACKUP, _TRAINING, _FINISHED, _LOST_TASK))
    ]
    return [read(folder, name) or Steps(0, 0) for name in names]


def _lost_steps(folder: str | os.PathLike[str]) -> tuple[int, int]:
    try:
        reached, lost = map(int, read_file(pathlib.Path(folder, _LOST)).split())
    except (OSError, ValueError):
        return 0, 0
    return reached, lost


def _write_numbers(folder: str | os.PathLike[str], name: str, *numbers: int) -> None:
    file = open_own(pathlib.Path(folder, name), os.O_WRONLY, 0o600)
    try:
        os.pwrite(file, " ".join(map(str, numbers)).ljust(_NUMBERS).encode(), 0)
    finally:
        os.close(file)


@contextlib.contextmanager
def _warning_once() -> Iterator[None]:
    """Warns of a file's error once in this process instead of raising it: progress reports must not end training."""
    global _has_warned
    try:
        yield
    except OSError as e:
        if not _has_warned:
            _has_warned = True
            logger.warning(
                f"cannot write {os.environ.get(FOLDER)}: {write_error_reason(e)}; the training continues, but its supervisor may not know its "
                "step. Free the disk, or set TMPDIR to a folder on another one."
            )
