"""Files through which tasks and the supervisor that started them exchange progress. No TensorFlow here.

They share a folder, named by an environment variable. In it each task keeps its step, its epoch, the step of the last backup and its last
metrics, that it has made a strategy and that it refuses its backups; the supervisor keeps the number of restarts and of steps that were lost.
"""

from __future__ import annotations

import atexit
import contextlib
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

FOLDER = "TFDIST_PROGRESS"
LAUNCHED = "TFDIST_LAUNCHED"  # when the supervisor itself was started, in seconds since the epoch
_FORM = struct.Struct("<5q")
_METRICS_BYTES = 512  # behind the numbers: lines `name value`, of which the last ones are dropped that do not fit
_RESTARTS = "restarts"
_STRATEGY = "strategy"
_LOST = "lost_steps"  # how far tasks were before the restart, until the steps to repeat are counted; and how many were so far
_REFUSAL = "refusal"
_BACKED_UP = "backed_up"
_FILES = "files"  # a folder for temporary files of tasks
_OF_ALL = (_RESTARTS, _STRATEGY, _LOST, _REFUSAL, _BACKED_UP, _FILES)
_EVALUATOR = "evaluator-"  # how the names of tasks begin that train nothing
_FINISHED = "finished-"
_TRAINING = "training-"
_BACKUP = "backup-"  # and those of files that stand for folders which hold backups
REUSED = ".reused"  # behind the name: this run has removed backups there, and may train something else in the folder
_NUMBERS = 40  # bytes of a file of numbers: it is overwritten in place, so that a full disk leaves the numbers before

_has_warned = False
_mine: Steps | None = None  # of this process, as last told


class Steps(NamedTuple):
    """The progress of a task.

    Attributes:
        done: Training steps done.
        saved: The step of the last backup, from which a restart goes on; 0 without any.
        epoch: The epoch, from 1; 0 if it is not told.
        epochs: The last epoch; 0 if it is not told.
        total: The step at which the training will end; 0 if it is not known.
    """

    done: int
    saved: int
    epoch: int = 0
    epochs: int = 0
    total: int = 0


class Progress:
    """A task's own file; without a supervisor, nothing.

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

    def write(
        self,
        done: int | None = None,
        saved: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        **changed: int,
    ) -> None:
        """Publishes changed values, by the names of `Steps`; cheap enough for every step.

        Args:
            done: As of `Steps`; fewer than before begin another training.
            saved: As of `Steps`.
            metrics: The training's logs: numbers by name. Others keep their last value.
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
                os.pwrite(self._file, _FORM.pack(*self._steps) + _pack_metrics(self._metrics), 0)

    def touch(self) -> None:
        """Tells that the task works on."""
        if self._file is not None:
            with _warning_once():
                os.utime(self._file)


def mark_strategy() -> None:
    """Tells that this task has made a strategy; without a supervisor, nothing."""
    _mark(_STRATEGY)


def mark_finished(name: str) -> None:
    """Tells that a task, such as `worker-1`, has finished its training; without a supervisor, nothing."""
    _mark(f"{_FINISHED}{name}")


@contextlib.contextmanager
def training(name: str) -> Iterator[None]:
    """Tells that a task, such as `worker-1`, trains inside; without a supervisor, nothing.

    The mark stays if the process ends inside without Python's own end, as by `os._exit`.
    """
    _mark(mark := f"{_TRAINING}{name}")
    atexit.register(_unmark, mark)  # a loop of the user's own may be left as it is
    try:
        yield
    finally:
        atexit.unregister(_unmark)
        _unmark(mark)


def mark_backed_up() -> None:
    """Tells that this task's training is backed up; without a supervisor, nothing."""
    _mark(_BACKED_UP)


def mark_refusal() -> None:
    """Tells that this task ends because its backups cannot be used, as it would after a restart; without a supervisor, nothing."""
    _mark(_REFUSAL)


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
    """Notes that a folder holds a backup, or none any more, for this task after a restart; without a supervisor, nothing."""
    if note := backup_note(backup_dir):
        with _warning_once():
            if exists:
                note.touch()
            else:
                note.unlink(missing_ok=True)
                note.with_name(note.name + REUSED).touch()


def had_backup(backup_dir: str) -> bool:
    """Returns whether this run has noted, before a restart or since, that a folder holds a backup."""
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
        OSError: It cannot be made.
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
    """Returns when the supervisor was started, by `time.time()`; 0 without a supervisor."""
    return float(os.environ.get(LAUNCHED) or 0)


def restarts() -> int:
    """Returns how often the supervisor has restarted this run, or a task of it; 0 without a supervisor."""
    try:
        return int(read_file(pathlib.Path(os.environ[FOLDER], _RESTARTS)))
    except (KeyError, OSError, ValueError):
        return 0


def settle_lost_steps() -> int | None:
    """Returns how many steps all restarts so far have made the run repeat; None without a supervisor or a backup.

    For one task, as it has ended its first step and not told so yet: then `Progress` still has the step from which it goes on.
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
    """Returns how far a task is, or None if it has not said so."""
    try:
        return Steps(*_FORM.unpack_from(read_file(pathlib.Path(folder, name))))
    except (OSError, struct.error):
        return None


def read_metrics(folder: str | os.PathLike[str], name: str) -> dict[str, str]:
    """Returns the last metrics that a task has told, as texts by name: `{"loss": "0.1234"}`; empty if it has told none."""
    try:
        content = read_file(pathlib.Path(folder, name))[_FORM.size :]
    except OSError:
        return {}
    lines = content.rstrip(b"\0").decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines) if name}


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
    """Returns when a task has last told anything, by `time.time()`; 0 if it never has."""
    try:
        return os.path.getmtime(os.path.join(folder, name))
    except OSError:
        return 0.0


def has_finished(folder: str | os.PathLike[str], name: str) -> bool:
    """Returns whether a task has finished its training."""
    return pathlib.Path(folder, f"{_FINISHED}{name}").exists()


def is_training(folder: str | os.PathLike[str], name: str) -> bool:
    """Returns whether a task trains, or has ended in its training without Python's own end."""
    return pathlib.Path(folder, f"{_TRAINING}{name}").exists()


def has_refusal(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task refuses its backups."""
    return pathlib.Path(folder, _REFUSAL).exists()


def is_backed_up(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task's training is backed up."""
    return pathlib.Path(folder, _BACKED_UP).exists()


def how_to_continue(saved: int | None) -> str:
    """Returns the advice after training was ended; `saved` is the last backup's step, 0 without one, or None if it is not known."""
    if saved is None:
        return "Run the same command again to continue from the chief's last backup, if there is one"
    if saved:
        return f"Run the same command again to continue from step {saved}"
    return "There is no backup, so nothing is kept: the same command starts from the beginning"


def how_to_continue_mine() -> str:
    """Returns the same for this process, after a full stop; empty where it has not trained, or a supervisor says it."""
    return "" if _mine is None or is_supervised() else f". {how_to_continue(_mine.saved)}"


def uses_tfdist(folder: str | os.PathLike[str]) -> bool:
    """Returns whether any task has made a strategy, or trained."""
    names = (path.name for path in pathlib.Path(folder).iterdir())
    return any(name not in (_RESTARTS, _LOST) and not name.startswith(_BACKUP) for name in names)


def clear(folder: str | os.PathLike[str], restarts: int) -> None:
    """Forgets how far each task was, and tells those to come of how many restarts they are, and how far all were.

    Raises:
        OSError: Something cannot be written.
    """
    reached, lost = _lost_steps(folder)
    reached = max([reached, *(steps.done for steps in _read_all(folder))])
    for path in pathlib.Path(folder).iterdir():
        if path.name == _FILES:  # of tasks that were killed
            shutil.rmtree(path, ignore_errors=True)
        # An evaluator runs on, backups stay, and numbers are overwritten.
        elif not path.name.startswith((_EVALUATOR, _BACKUP)) and path.name not in (_RESTARTS, _LOST):
            path.unlink()
    _write_numbers(folder, _LOST, reached, lost)
    write_restarts(folder, restarts)


def write_restarts(folder: str | os.PathLike[str], restarts: int) -> None:
    """Tells the tasks of how many restarts they are.

    Raises:
        OSError: It cannot be written.
    """
    _write_numbers(folder, _RESTARTS, restarts)


def _read_all(folder: str | os.PathLike[str]) -> list[Steps]:
    """Returns how far each task is; one that has not said so is at its begin."""
    names = [
        path.name
        for path in pathlib.Path(folder).iterdir()
        if path.name not in _OF_ALL and not path.name.startswith((_EVALUATOR, _BACKUP, _TRAINING, _FINISHED))
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
                f"cannot write {os.environ.get(FOLDER)}: {write_error_reason(e)}; the training goes on, but its supervisor may not know how far "
                "it is. Free the disk, or set TMPDIR to a folder on another one."
            )
