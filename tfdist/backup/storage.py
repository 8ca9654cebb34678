"""Backups on disk, or at an fsspec URL: written by all ranks, valid once the manifest exists.

    backup/checkpoint                     names the backups, in TensorFlow's form
    backup/step-400/shared.{index,data}   state of all ranks, written by the chief
    backup/step-400/rank-1.{index,data}   state of rank 1 alone, and its pieces of split values, written by it
    backup/step-400/manifest.json         names all other files, with sizes and checksums; written last, by the chief

At the end of an epoch the folder is `step-400-end`; another backup of the same step, from before the validation, may exist. A backup
is never overwritten. The parts are TensorFlow checkpoints, which `tf.train.load_checkpoint` reads. Their indices hold a checksum of each tensor,
and the manifest holds a checksum of each index, so that torn files and flipped bits are detected. A part's index appears when the part is
complete, so the chief only waits for all indices. A rank deletes only its own files. The chief also deletes damaged backups: it renames
them to `damaged-step-400` when a run continues from an older backup, and removes them once the next backup is complete. A backup that is
being removed has a file `removed`. `runtime/folders/finished_training.py` removes the backups of a training whose model is saved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.backup import contents, files, pieces
from tfdist.backup.contents import BEFORE_ALL, FORMAT, SHARED, SavePoint, part_of
from tfdist.backup.files import CorruptBackupError, ReadError, UnreadableBackupError
from tfdist.errors import BackupError, ConfigError, format_value
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.log import logger

MANIFEST = "manifest.json"
STATE_FILE = "checkpoint"
REMEDY = "or, to train from the beginning, remove {!r} or choose another backup_dir."
_PARTIAL = ".partial"
_DATA_FILE = re.compile(r"\.data-.{5}-of-.{5}")
_PART_FILE = re.compile(r"rank-(\d+)\.")
_CHECKPOINT_PATH = re.compile(r'checkpoint_paths?: "(.*)"')
PARTS_TIMEOUT = 300.0  # seconds
_REPORT_EVERY = 10.0
_POLL, _POLL_URL = 0.01, 0.2
_DAMAGED = "damaged-"
_REMOVED = "removed"  # the manifest of a backup that is being removed


@dataclasses.dataclass(frozen=True)
class Storage:
    """The backups of one training, in a folder that all ranks share, or on the chief's host. Rank 0 is the chief.

    Attributes:
        folder: The folder.
        rank: This task's rank.
        ranks: The number of tasks.
        is_shared: Whether all ranks see the same folder. If not, the chief writes and removes the files of all ranks (`unshared.py`).
    """

    folder: str
    rank: int
    ranks: int
    is_shared: bool = True

    def points(self) -> list[SavePoint]:
        """Returns the save points of all backups, complete or not, newest first."""
        points = map(SavePoint.of_folder, files.list_folder(self.folder))
        local = files.is_local(self.folder)
        return sorted({p for p in points if p and not (local and os.path.isfile(self.path(p)))}, reverse=True)

    def completed(self) -> set[SavePoint]:
        """Returns the save points of the backups that are, or once were, complete."""
        try:
            state = files.read(os.path.join(self.folder, STATE_FILE)).decode(errors="replace")
        except CorruptBackupError:
            state = ""
        named = (
            SavePoint.of_folder(os.path.basename(os.path.dirname(path))) for path in _CHECKPOINT_PATH.findall(state)
        )
        return {*filter(None, named)} | {point for point in self.points() if self.is_complete(point)}

    def path(self, point: SavePoint, name: str = "") -> str:
        """Returns the path of a backup, or of one of its files."""
        return os.path.join(self.folder, point.folder, name).rstrip("/")

    def write_part(
        self, point: SavePoint, part: str, tensors: Mapping[str, Any], stop: threading.Event | None = None
    ) -> None:
        """Writes a part: `shared`, or `rank-<rank>`. For a URL, writes it to the local disk and uploads it.

        An upload that fails is tried again for some seconds, but not once `stop` is set. Raises BackupError if the part cannot be written.
        """
        prefix = self.path(point, part)
        try:
            if files.is_local(prefix):
                os.makedirs(self.path(point), exist_ok=True)
                _save(prefix, tensors)
                return
            with temporary_folder() as folder:
                _save_locally(os.path.join(folder, part), tensors)
                for name in sorted(os.listdir(folder)):  # the index comes last
                    upload = functools.partial(urls.upload, os.path.join(folder, name), self.path(point, name))
                    urls.with_retries(upload, stop=stop)
        except (tf.errors.OpError, OSError) as e:
            raise _write_error(prefix, e) from e

    def read_part(self, point: SavePoint, part: str) -> dict[str, np.ndarray]:
        """Returns the tensors from `write_part`. Raises CorruptBackupError if they are damaged, and UnreadableBackupError if they cannot be read."""
        prefix = self.path(point, part)
        names = [name for name in files.list_folder(self.path(point)) if name.startswith(f"{part}.")]
        if not names:
            raise self._missing(point, prefix)
        if files.is_local(prefix):
            for name in names:
                files.size(self.path(point, name))  # raises for a link, which TensorFlow would follow
            return _load(prefix, prefix, names)
        try:
            with temporary_folder() as folder:
                for name in names:
                    urls.download(self.path(point, name), os.path.join(folder, name))
                return _load(os.path.join(folder, part), prefix, names)
        except FileNotFoundError as e:
            raise self._missing(point, prefix) from e
        except OSError as e:
            if e.filename and files.is_local(e.filename):
                raise UnreadableBackupError(f"{prefix} cannot be read: {_temporary_error(e.filename, e)}") from e
            raise files.unreadable(prefix, e) from e

    def read_shared(self, point: SavePoint, tasks: int) -> dict[str, Any]:
        """Returns the state of all ranks: the part `shared`, with whole values in place of the pieces in it and in the parts of a number of tasks.

        The pieces of a local backup are read twice: now, to find damage, and when a value is used.
        """
        parts = ((name, self.read_part(point, name)) for name in (SHARED, *map(part_of, range(tasks))))
        read = functools.partial(self._read_tensor, point) if files.is_local(self.folder) else None
        return pieces.join(parts, self.path(point), read)

    def _read_tensor(self, point: SavePoint, part: str, name: str) -> np.ndarray:
        tensor: np.ndarray = tf.train.load_checkpoint(self.path(point, part)).get_tensor(name)
        return tensor

    def write_manifest(
        self,
        point: SavePoint,
        values: Mapping[str, Any],
        keep: int,
        stop: threading.Event | None = None,
        given_up: Callable[[], str] = str,
    ) -> None:
        """Completes a backup, once all ranks have written their parts, and keeps the newest `keep` backups. Runs on the chief.

        `stop` is as in `write_part`; `given_up` returns why another rank has not written its part, or an empty text. Raises BackupError if the
        manifest cannot be written, or if another rank's part does not appear within 300 s.
        """
        path = self.path(point, MANIFEST)
        try:
            complete = functools.partial(self._complete, point, values, given_up)
            urls.with_retries(complete, stop=stop, passing=(urls.PassingError, UnreadableBackupError))
            self._keep_newest(keep)
        except (tf.errors.OpError, OSError, ReadError) as e:
            raise _write_error(path, e) from e

    def _complete(self, point: SavePoint, values: Mapping[str, Any], given_up: Callable[[], str]) -> None:
        written: dict[str, Any] = {}
        for part in (SHARED, *map(part_of, range(self.ranks))):
            self._wait_for_index(point, part, given_up)
            for name in files.list_folder(self.path(point)):
                if name.startswith(part) and _DATA_FILE.fullmatch(name.removeprefix(part)):
                    written[name] = {"bytes": urls.size(self.path(point, name))}
            index = files.read(self.path(point, f"{part}.index"))
            written[f"{part}.index"] = {"bytes": len(index), "crc32": zlib.crc32(index)}
        # The checksum is of the values as they will be read: JSON turns tuples into lists, and keys into texts.
        body = json.loads(json.dumps({**values, "files": written}))
        body["crc32"] = contents.checksum(body)
        urls.write(self.path(point, MANIFEST), json.dumps(body, indent=1).encode())

    def _keep_newest(self, keep: int) -> None:
        try:
            complete = [point for point in self.points() if self.is_complete(point)]
            if complete:  # none in a list that the storage has not renewed
                self._name_all(sorted(complete[:keep]))
            for old in complete[keep:]:
                self.remove(old)
        except (OSError, ReadError) as e:
            if files.is_local(self.folder):
                raise
            logger.warning(f"{files.first_line(e)}; backups older than the newest {keep} remain until the next backup")

    def _name_all(self, points: Sequence[SavePoint]) -> None:
        # In the format of TensorFlow, but with paths relative to the folder, which may be moved.
        paths = [json.dumps(f"{point.folder}/{SHARED}") for point in points]
        lines = [f"model_checkpoint_path: {paths[-1]}", *(f"all_model_checkpoint_paths: {path}" for path in paths)]
        path = os.path.join(self.folder, STATE_FILE)
        urls.write(path, ("\n".join(lines) + "\n").encode())

    def read_manifest(self, point: SavePoint) -> dict[str, Any]:
        """Returns a backup's manifest after a check of its fields, and that its files exist with the sizes and checksums in it.

        Raises as `read_part` does, and ConfigError for a backup of another version.
        """
        path = self.path(point, MANIFEST)
        if files.size(path) is None:
            raise self._missing(point, path)
        body = contents.parse_manifest(files.read(path), path)
        if body.get("format") != FORMAT:
            raise ConfigError(
                f"The backup {self.path(point)} was written by another version of tfdist: it has format {format_value(body.get('format'))}, "
                f"and this version reads format {FORMAT}. Continue with that version; {REMEDY.format(self.folder)}"
            )
        contents.check_manifest(body, point, path)
        for name, expected in body["files"].items():
            path = self.path(point, name)
            size = files.size(path)
            if size is None:
                raise self._missing(point, path)
            is_intact = size == expected.get("bytes")
            if "crc32" in expected:
                is_intact = is_intact and expected["crc32"] == zlib.crc32(files.read(path))
            if not is_intact:
                raise CorruptBackupError(f"{path} differs from the data written")
        return body

    def _missing(self, point: SavePoint, path: str) -> ReadError:
        if files.is_folder(self.path(point)):
            return CorruptBackupError(f"{path} is missing")
        return UnreadableBackupError(f"{self.path(point)} cannot be read: it is not there any more")

    def clean(self, after: SavePoint | None = None) -> None:
        """Removes this rank's files from backups without a manifest that are later than `after`, from which the training continues.

        If `after` is None, removes them from such backups before the newest complete backup.
        """
        if self.rank and not self.is_shared:
            return
        try:
            points = self.points()
        except UnreadableBackupError:
            return
        newest = next((point for point in points if self.is_complete(point)), BEFORE_ALL)
        for point in points:
            is_left = point < newest
            if after is not None:
                is_left = point > after
            if is_left and self.is_unfinished(point):
                self.remove(point)

    def remove(self, point: SavePoint, every_rank: bool = False) -> None:
        """Removes the files of this rank or of every rank from a backup, and the folder once it is empty."""
        if files.is_link(self.path(point)):
            if self.rank == 0:
                urls.remove(self.path(point))
            return
        own_prefixes: tuple[str, ...] = ()
        if self.rank == 0:
            own_prefixes = (f"{SHARED}.", MANIFEST)
            # Rename the manifest first, so that no reader takes the remaining files for a backup.
            try:
                urls.rename(self.path(point, MANIFEST), self.path(point, _REMOVED))
            except FileNotFoundError:  # the backup was never complete
                pass
        try:
            for name in urls.list_folder(self.path(point)):
                if name.startswith(own_prefixes) or self._owns(name) or (every_rank and name != _REMOVED):
                    urls.remove(self.path(point, name))
            if not {*urls.list_folder(self.path(point))} - {_REMOVED}:
                urls.remove_tree(self.path(point))
        except FileNotFoundError:  # another rank has removed the folder
            pass

    def _owns(self, name: str) -> bool:
        """Returns whether this rank removes a file: of its own part, or of the part of a rank that this run does not have."""
        match = _PART_FILE.match(name)
        return match is not None and (int(match[1]) % self.ranks == self.rank or not self.is_shared)

    def is_complete(self, point: SavePoint) -> bool:
        """Returns whether all ranks have written a backup and no rank has begun to remove it."""
        try:
            return files.is_folder(self.path(point)) and files.size(self.path(point, MANIFEST)) is not None
        except ReadError:
            return False

    def is_removed(self, point: SavePoint) -> bool:
        """Returns whether a backup has been removed or is being removed; False if unknown."""
        try:
            if self.is_complete(point):
                return False
            return not files.is_folder(self.path(point)) or files.size(self.path(point, _REMOVED)) is not None
        except ReadError:
            return False

    def is_unfinished(self, point: SavePoint) -> bool:
        """Returns whether a backup has no manifest; False if unknown."""
        try:
            return files.size(self.path(point, MANIFEST)) is None
        except ReadError:
            return False

    def written_at(self, point: SavePoint) -> int:
        """Returns when a backup was completed, in nanoseconds; 0 if it is being removed, or unknown."""
        try:
            return urls.modified(self.path(point, MANIFEST))
        except (FileNotFoundError, urls.StorageError):
            return 0

    def has_begun(self, point: SavePoint) -> bool:
        """Returns whether the chief has begun to write a backup and has not removed it."""
        return any(name.startswith("rank-0.") for name in files.list_folder(self.path(point)))

    def _wait_for_index(self, point: SavePoint, part: str, given_up: Callable[[], str]) -> None:
        begun = reported = time.monotonic()
        pause = _POLL if files.is_local(self.folder) else _POLL_URL
        while not urls.exists(self.path(point, f"{part}.index")):
            now = time.monotonic()
            reason = given_up()
            if reason:
                raise BackupError(f"another task has failed: {reason}")
            if now - begun > PARTS_TIMEOUT:
                raise BackupError(
                    f"{self.path(point, part)}.index has not appeared within {PARTS_TIMEOUT:.0f} s. Do all tasks see the same "
                    f"folder {self.folder!r}? backup_dir must be a folder that all tasks share."
                )
            if now - reported > _REPORT_EVERY:
                logger.info(f"waiting for {self.path(point, part)}.index")
                reported = now
            time.sleep(pause)


def _save(prefix: str, tensors: Mapping[str, Any]) -> None:
    """Writes tensors to a checkpoint. The rows of servers are read and written in chunks: each is a checkpoint, and then all are merged."""
    on_servers = {name: value for name, value in tensors.items() if isinstance(value, pieces.ServerRows)}
    held = {name: value for name, value in tensors.items() if name not in on_servers}
    if not on_servers:
        return _save_tensors(prefix, held)
    # If the process ends here, these files are removed with the part, whose name theirs begin with.
    written: list[str] = []
    if held:
        written.append(f"{prefix}.chunk-0")
        _save_tensors(written[0], held)
    for name, value in on_servers.items():
        shape = " ".join(map(str, value.shape))
        columns = ":-" * (len(value.shape) - 1)
        with tf.device("CPU:0"):
            for begin, rows in value.chunks():
                written.append(f"{prefix}.chunk-{len(written)}")
                _save_tensors(written[-1], {name: rows}, f"{shape} {begin},{len(rows)}{columns}")
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=False)
    return None


def _save_tensors(prefix: str, tensors: Mapping[str, Any], slice_: str = "") -> None:
    names = list(tensors)
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=names,
            shape_and_slices=[slice_] * len(names),
            tensors=[tf.convert_to_tensor(tensors[name]) for name in names],
        )


def _save_locally(prefix: str, tensors: Mapping[str, Any]) -> None:
    try:
        _save(prefix, tensors)
    except (tf.errors.OpError, OSError) as e:
        raise _temporary_error(prefix, e) from e


def _temporary_error(path: str, error: Exception) -> WriteError:
    return WriteError(
        f"the temporary file {path} could not be written ({write_error_reason(error)}). Free its disk, or set TMPDIR to a folder on another one"
    )


def _load(prefix: str, shown: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the tensors in local files. `shown` is the path in messages, and `names` are the files' names."""
    # TensorFlow raises the same error for a damaged file and for one that could not be read. If its files can be read after an error,
    # the second attempt decides.
    for is_last in (False, True):
        try:
            reader = tf.train.load_checkpoint(prefix)
            return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        except files.PASSING as e:
            raise files.unreadable(shown, e) from e
        except Exception as e:
            for name in names:
                files.check_readable(os.path.join(os.path.dirname(prefix), name))
            if is_last:
                raise CorruptBackupError(f"{shown} differs from the data written: {files.first_line(e)}") from e
    raise AssertionError


def set_damaged_aside(storage: Storage, after: SavePoint) -> None:
    """Renames the backups later than `after`, from which a run continues, so that no new backup is written into their folders.

    `Storage.clean` handles backups that were never complete. Raises OSError if a folder cannot be renamed.
    """
    completed = storage.completed()
    for point in storage.points():
        if point > after and (point in completed or not storage.is_unfinished(point)):
            names = files.list_folder(storage.folder)
            new = _DAMAGED + point.folder
            number = 1
            while new in names:
                number += 1
                new = f"{_DAMAGED}{point.folder}-{number}"
            urls.rename(storage.path(point), os.path.join(storage.folder, new))


def remove_damaged(folder: str) -> None:
    """Removes the folders that `set_damaged_aside` has renamed; warns of those that cannot be removed."""
    path = folder
    try:
        for name in files.list_folder(folder):
            if name.startswith(_DAMAGED):
                path = os.path.join(folder, name)
                urls.remove_tree(path)
    except (OSError, files.ReadError) as e:
        logger.warning(f"damaged backups remain, as {path} cannot be removed: {files.first_line(e)}")


def _write_error(path: str, error: Exception) -> BackupError:
    reason = files.first_line(error).rstrip(".")
    if isinstance(error, urls.StorageError) or not files.is_local(path):
        return BackupError(f"{reason}.")
    return BackupError(f"The backup {path} could not be written: {reason}. Earlier backups remain.")
