"""The progress that each task reports to the supervisor that started it. No TensorFlow here.

They share a folder, named by an environment variable: each task writes one record there, `<task>.json`, and the supervisor one of the job. The
reports by which tasks tell slow from stuck tasks are others (`task_report.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import numbers
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.files import open_own, read_file, warning_once
from tfdist.runtime.log import logger
from tfdist.runtime.report.phase import main as phases

FOLDER = "TFDIST_PROGRESS"
TASK = "TFDIST_TASK"  # the task's name, such as `worker-1`
LAUNCHED = "TFDIST_LAUNCHED"  # the start time of the supervisor, in seconds since the epoch
REPLICAS = "TFDIST_REPLICAS"  # the replicas of all workers together, where the number of workers may change
_SUFFIX = ".json"  # of the tasks' records
_JOB = "job"
_FILES = "files"  # a folder for temporary files of tasks
_EVALUATOR = "evaluator-"  # prefix of the names of tasks that do not train
_BACKUP = "backup-"  # prefix of the files that stand for folders with backups
_BYTES = 4096
_METRICS = 20  # more than the table has room for

_Record = TypeVar("_Record", "Progress", "_Job")


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


@dataclasses.dataclass
class Progress:
    """The record of a task.

    Attributes:
        begun: Whether it has begun to train, or to evaluate backups.
        done: Training steps completed.
        saved: The step of the last backup, from which a restart continues; 0 without a backup.
        epoch: The epoch, from 1; 0 if unknown.
        epochs: The last epoch; 0 if unknown.
        total: The step at which the training will end; 0 if unknown.
        activity: As in `phase.Phase`.
        metrics: The last metrics, as texts.
        trains: Whether it is within a `fit`, or has ended there without Python's shutdown, as by `os._exit`.
        finished: Whether its command has succeeded.
        backed_up: Whether its training is backed up.
        refused: Whether it ends because its backups cannot be used, also after a restart.
        lost: The loss of another task because of which it ends. The supervisor then reports the other task, and does not show the errors
            of this one: its log has them.
        error: The error that ends its process, in one line.
        kind: The kind of that end, an `ending.Kind`.
        exit_code: The exit code of that end; None while it runs, and if it could not tell its end.
        repeated: The number of steps that the run has repeated after restarts; None until the task has counted them.
    """

    begun: bool = False
    done: int = 0
    saved: int = 0
    epoch: int = 0
    epochs: int = 0
    total: int = 0
    activity: str = ""
    metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    trains: bool = False
    finished: bool = False
    backed_up: bool = False
    refused: bool = False
    lost: Loss | None = None
    error: str = ""
    kind: str = ""
    exit_code: int | None = None
    repeated: int | None = None

    def __post_init__(self) -> None:
        self.lost = self.lost and Loss(*self.lost)  # JSON has a list


@dataclasses.dataclass
class _Job:
    """The supervisor's record: the restarts; the largest step before the last one; the steps repeated after those before."""

    restarts: int = 0
    reached: int = 0
    repeated: int = 0


class _Own:
    """The record of this process's task, and its file; without a supervisor only the record."""

    def __init__(self, path: str):
        self.path = path
        self.file: int | None = None
        # Another process of this task may have written before.
        self.record = _load(path, Progress)
        self.logs: Mapping[str, Any] = {}  # the last metrics as they came, which may be tensors
        if path:
            with _warning_once():
                self.file = open_own(path, os.O_WRONLY)


_own: _Own | None = None


def _find_own() -> _Own:
    global _own
    folder = _folder()
    # A task that is forked from the warm spare gets its variables after the fork.
    path = _path(folder, os.environ.get(TASK, "worker-0")) if folder else ""
    if _own is None or _own.path != path:
        _own = _Own(path)
    return _own


def write(metrics: Mapping[str, Any] | None = None, **changed: Any) -> None:
    """Changes this task's record, and publishes it to the supervisor, if there is one. Cheap enough for every step: about 40 us.

    Args:
        metrics: The training's logs: numbers by name. Other metrics keep their last value.
        **changed: Other fields of `Progress`. A smaller `done` than before begins another training.
    """
    own = _find_own()
    record = own.record
    if "done" in changed:
        record.begun = True
        if changed["done"] < record.done:
            record.metrics = {}
            own.logs = {}
    own.logs = metrics or own.logs
    texts = {name: f"{value:.4g}" for name, value in (metrics or {}).items() if isinstance(value, numbers.Real)}
    record.metrics = dict(itertools.islice({**record.metrics, **texts}.items(), _METRICS))
    # Field by field: a thread that writes backups changes other fields at the same time.
    for name, value in changed.items():
        setattr(record, name, value)
    if own.file is not None:
        with _warning_once():
            _write(own.file, record)


phases.readers["progress"] = lambda activity: write(activity=activity)


def touch() -> None:
    """Updates the time of this task's record, to show that the task is working."""
    own = _find_own()
    if own.file is not None:
        with _warning_once():
            os.utime(own.file)


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Reports that this task trains within the context."""
    write(begun=True, trains=True)
    hooks.at_end(hooks.Stage.REPORT, _end_training)  # a generator with a custom loop may never be closed
    try:
        yield
    finally:
        _end_training()


def _end_training() -> None:
    write(trains=False)


def shown_cause(error: BaseException) -> BaseException | None:
    """Returns the cause for `raise ... from`: `error`, or None where its traceback would hide the clear message from the user.

    The log of a supervised task keeps the traceback. Without a supervisor, the level DEBUG of the logger "tfdist" shows it.
    """
    return error if is_supervised() or logger.isEnabledFor(logging.DEBUG) else None


def _folder() -> str | None:
    """Returns the folder that this task shares with its supervisor; None without a supervisor."""
    folder = os.environ.get(FOLDER)
    return folder if folder and os.path.isdir(folder) else None


def note_backup(backup_dir: str, exists: bool = True) -> bool:
    """Records for this task's next process and its supervisor whether a folder has a backup; does nothing without a supervisor.

    Returns:
        False if the record cannot be written, as on a full disk.
    """
    note = _backup_note(backup_dir)
    if note is None:
        return True
    with _warning_once():
        if exists:
            note.write_bytes(os.fsencode(_absolute(backup_dir)))
        else:
            note.unlink(missing_ok=True)
        return True
    return False


def had_backup(backup_dir: str) -> bool:
    """Returns whether this run has recorded, before a restart or since, that a folder has a backup."""
    note = _backup_note(backup_dir)
    return note is not None and note.exists()


def folders_with_backups(folder: str) -> list[str]:
    """Returns the folders that tasks have recorded to have a backup."""
    notes = [path.read_bytes() for path in pathlib.Path(folder).glob(f"{_BACKUP}*")]
    return [os.fsdecode(note) for note in notes if note]  # empty if the disk was full


def _backup_note(backup_dir: str) -> pathlib.Path | None:
    """Returns the file that stands for a folder of backups; None without a supervisor."""
    folder = _folder()
    if folder is None:
        return None
    return pathlib.Path(folder, f"{_BACKUP}{zlib.crc32(os.fsencode(_absolute(backup_dir))):08x}")


def _absolute(backup_dir: str) -> str:
    return backup_dir if "://" in backup_dir else os.path.abspath(backup_dir)


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
    folder = _folder()
    return _read_job(folder).restarts if folder else 0


def settle_lost_steps() -> int | None:
    """Returns the number of steps that the run has repeated after restarts so far; None without a supervisor, or before the training.

    The chief calls it after its first step, before it reports that step: then its record still has the step from which it continues.
    """
    folder = _folder()
    record = _find_own().record
    if folder is None or not record.begun:
        return None
    if record.repeated is None:
        job = _read_job(folder)
        write(repeated=job.repeated + max(job.reached - record.done, 0))
    return record.repeated


def has_lost() -> bool:
    """Returns whether this process's task has reported the loss of another one. Waits for nothing."""
    return _find_own().record.lost is not None


def own() -> Progress:
    """Returns the record of this process's task. Waits for a step that still computes its metrics, which `write` does not."""
    own = _find_own()
    values = {name: value for name, value in own.logs.items() if not isinstance(value, str)}
    texts = {name: f"{float(value):.4g}" for name, value in values.items() if getattr(value, "shape", ()) == ()}
    return dataclasses.replace(own.record, metrics={**own.record.metrics, **texts})


def read(folder: str, name: str) -> Progress:
    """Returns a task's record; an empty one if it has not written any."""
    return _load(_path(folder, name), Progress)


def read_all(folder: str) -> list[Progress]:
    """Returns the records of all tasks that have created a strategy, or trained."""
    return [_load(path, Progress) for path in _paths(folder)]


def touched(folder: str, name: str) -> float:
    """Returns the time of a task's last report, by `time.time()`; 0 without a report."""
    try:
        return os.path.getmtime(_path(folder, name))
    except OSError:
        return 0.0


def is_backed_up(folder: str) -> bool:
    """Returns whether any task's training is backed up."""
    return any(record.backed_up for record in read_all(folder))


def how_to_continue(saved: int | None) -> str:
    """Returns the advice after an interrupted training; `saved` is the last backup's step, 0 without a backup, or None if unknown."""
    if saved is None:
        return "Run the same command again to continue from the chief's last backup, if there is one"
    if saved:
        return f"Run the same command again to continue from step {saved}"
    return "There is no backup, so nothing is kept: the same command starts from the beginning"


def how_to_continue_mine() -> str:
    """Returns the advice for this process, after a full stop; empty if it has not trained, or a supervisor prints the advice."""
    record = _find_own().record
    return "" if is_supervised() or not record.begun else f". {how_to_continue(record.saved)}"


process_end.advice = how_to_continue_mine


def clear(folder: str, restarts: int) -> None:
    """Removes the tasks' records before a restart; writes the number of restarts and the largest step reached for the next processes.

    Raises:
        OSError: A file cannot be written or removed.
    """
    job = _read_job(folder)
    records = read_all(folder)
    reached = max((record.done for record in records), default=0)
    repeated = max((record.repeated for record in records if record.repeated is not None), default=None)
    if repeated is None:  # the last restart's steps have not been counted
        repeated = job.repeated
        reached = max(job.reached, reached)
    shutil.rmtree(os.path.join(folder, _FILES), ignore_errors=True)  # left by killed tasks
    for path in _paths(folder):
        if not path.name.startswith(_EVALUATOR):  # the evaluator keeps running
            path.unlink()
    _write_job(folder, _Job(restarts, reached, repeated))


def write_restarts(folder: str, restarts: int) -> None:
    """Writes the number of restarts for the tasks.

    Raises:
        OSError: The file cannot be written.
    """
    _write_job(folder, dataclasses.replace(_read_job(folder), restarts=restarts))


def forget_end(folder: str, name: str) -> None:
    """Removes the end from a task's record, before the task starts again alone.

    Raises:
        OSError: The file cannot be written.
    """
    record = read(folder, name)
    if record.lost or record.kind:
        record = dataclasses.replace(record, lost=None, error="", kind="", exit_code=None)
        store(folder, {f"{name}{_SUFFIX}": json.dumps(vars(record)).encode().ljust(_BYTES)})


def records(folder: str) -> dict[str, bytes]:
    """Returns the content of all records in a folder, by file name, to exchange between a task and its supervisor on another host."""
    contents = {}
    for path in [*_paths(folder), *pathlib.Path(folder).glob(f"{_BACKUP}*"), pathlib.Path(folder, _JOB)]:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            contents[path.name] = path.read_bytes().rstrip()
    return contents


def store(folder: str, contents: Mapping[str, bytes]) -> None:
    """Writes records of another host; an empty one is removed.

    Raises:
        OSError: A file cannot be written or removed.
    """
    for name, content in contents.items():
        path = pathlib.Path(folder, name)
        if content:
            new = path.with_name(f"{name}.new")
            new.write_bytes(content)
            new.replace(path)
        else:
            path.unlink(missing_ok=True)


def _path(folder: str, name: str) -> str:
    return os.path.join(folder, name + _SUFFIX)


def _paths(folder: str) -> list[pathlib.Path]:
    return [*pathlib.Path(folder).glob(f"*{_SUFFIX}")]


def _read_job(folder: str) -> _Job:
    return _load(os.path.join(folder, _JOB), _Job)


def _load(path: str | pathlib.Path, kind: type[_Record]) -> _Record:
    """Returns a record; an empty one if there is none, or a full disk has kept it from being written."""
    for _ in range(2):  # the first read may fall into a write
        try:
            return kind(**json.loads(read_file(path)))
        except OSError:
            break
        except (ValueError, TypeError):  # a record of two writes, or of another version
            pass
    return kind()


def _write(file: int, record: Progress | _Job) -> None:
    """Overwrites a record in place.

    Every record of a file has the same size, in general a page. So a full disk keeps the previous one, and a reader sees parts of two
    records only while the kernel copies this page.
    """
    size = max(_BYTES, os.fstat(file).st_size)
    os.pwrite(file, json.dumps(vars(record)).encode().ljust(size), 0)


def _write_job(folder: str, job: _Job) -> None:
    file = open_own(os.path.join(folder, _JOB), os.O_WRONLY, 0o600)
    try:
        _write(file, job)
    finally:
        os.close(file)


def _warning_once() -> contextlib.AbstractContextManager[None]:
    consequence = "but its supervisor may not know its step. Free the disk, or set TMPDIR to a folder on another one."
    return warning_once(os.environ[FOLDER], consequence)
