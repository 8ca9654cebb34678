"""Backups on disk, or at an fsspec URL: written by all ranks, valid once the manifest exists.

    backup/checkpoint                     names the backups, in TensorFlow's form
    backup/step-400/shared.{index,data}   state of all ranks, written by the chief
    backup/step-400/rank-1.{index,data}   state of rank 1 alone, written by it
    backup/step-400/manifest.json         names all other files, with sizes and checksums; written last, by the chief

At the end of an epoch the folder is `step-400-end`; another backup of the same step, from before the validation, may exist. A backup
is never overwritten. The parts are TensorFlow checkpoints, which `tf.train.load_checkpoint` reads. Their indices hold a checksum of each tensor,
and the manifest holds a checksum of each index, so that torn files and flipped bits are detected. A part's index appears when the part is
complete, so the chief only waits for all indices. A rank deletes only its own files. The chief also deletes damaged backups: it renames
them to `damaged-step-400` when a run continues from an older backup, and removes them once the next backup is complete. And it deletes
the backups of a finished training, once the model's own `save` has written the model. A backup that is being removed has a file `removed`.
"""

from __future__ import annotations

import contextlib
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

from tfdist.backup import contents, files
from tfdist.backup.contents import BEFORE_ALL, SavePoint
from tfdist.backup.files import CorruptBackupError, ReadError, UnreadableBackupError
from tfdist.errors import BackupError
from tfdist.runtime import storage as urls
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.log import logger
from tfdist.runtime.temporary import temporary_folder

MANIFEST = "manifest.json"
SHARED = "shared"
STATE_FILE = "checkpoint"
_PARTIAL = ".partial"
_DATA_FILE = re.compile(r"\.data-.{5}-of-.{5}")
_PART_FILE = re.compile(r"rank-(\d+)\.")
_CHECKPOINT_PATH = re.compile(r'checkpoint_paths?: "(.*)"')
_PARTS_TIMEOUT = 300.0  # seconds
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

    @property
    def part(self) -> str:
        """The name of this rank's part."""
        return part_of(self.rank)

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
        # The checksum is of the values as they will be read.
        body = json.loads(json.dumps({**values, "files": written}))
        body["crc32"] = contents.checksum(body)
        urls.write(self.path(point, MANIFEST), json.dumps(body, indent=1).encode())

    def _keep_newest(self, keep: int) -> None:
        try:
            complete = [point for point in self.points() if self.is_complete(point)]
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
        """Returns a backup's manifest after a check that its files exist with the sizes and checksums in it. Raises as `read_part` does."""
        path = self.path(point, MANIFEST)
        if files.size(path) is None:
            raise self._missing(point, path)
        body = contents.parse_manifest(files.read(path), path)
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
            if (point < newest if after is None else point > after) and self.is_unfinished(point):
                self.remove(point)

    def remove(self, point: SavePoint, every_rank: bool = False) -> None:
        """Removes the files of this rank or of every rank from a backup, and the folder once it is empty."""
        if files.is_link(self.path(point)):
            if self.rank == 0:
                urls.remove(self.path(point))
            return
        if self.rank == 0:  # first, so that no reader takes the remaining files for a backup
            with contextlib.suppress(FileNotFoundError):
                urls.rename(self.path(point, MANIFEST), self.path(point, _REMOVED))
        own_prefixes = (f"{SHARED}.", MANIFEST) if self.rank == 0 else ()
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

    def remove_all(self, every_rank: bool = False) -> None:
        """Removes the files of this rank or of every rank from all backups. The chief also removes the list of backups."""
        if self.rank == 0:
            for name in (STATE_FILE, STATE_FILE + _PARTIAL):
                urls.remove(os.path.join(self.folder, name))
            remove_damaged(self.folder)
        for point in self.points() if self.is_shared or self.rank == 0 else ():
            self.remove(point, every_rank)
        if files.is_local(self.folder):
            # It has other files, another rank was faster, or it is a volume or in another user's folder.
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            return
        with contextlib.suppress(FileNotFoundError):  # an object store, which has no empty folders
            if not urls.list_folder(self.folder):
                urls.remove_tree(self.folder)

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
        while not urls.exists(self.path(point, f"{part}.index")):
            now = time.monotonic()
            if reason := given_up():
                raise BackupError(f"another task has failed: {reason}")
            if now - begun > _PARTS_TIMEOUT:
                raise BackupError(
                    f"{self.path(point, part)}.index has not appeared within {_PARTS_TIMEOUT:.0f} s. Do all tasks see the same "
                    f"folder {self.folder!r}? backup_dir must be a folder that all tasks share."
                )
            if now - reported > _REPORT_EVERY:
                logger.info(f"waiting for {self.path(point, part)}.index")
                reported = now
            time.sleep(_POLL if files.is_local(self.folder) else _POLL_URL)


def part_of(rank: int) -> str:
    """Returns the name of a rank's part."""
    return f"rank-{rank}"


def _save(prefix: str, tensors: Mapping[str, Any]) -> None:
    names = list(tensors)
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=names,
            shape_and_slices=[""] * len(names),
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
    for last in (False, True):
        try:
            reader = tf.train.load_checkpoint(prefix)
            return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        except files.PASSING as e:
            raise files.unreadable(shown, e) from e
        except Exception as e:  # TensorFlow raises the same error for a damaged and for an unreadable file
            for name in names:
                files.check_readable(os.path.join(os.path.dirname(prefix), name))
            if last:
                raise CorruptBackupError(f"{shown} differs from the data written: {files.first_line(e)}") from e
    raise AssertionError


def set_damaged_aside(storage: Storage, after: SavePoint) -> None:
    """Renames the backups later than `after`, from which a run continues, so that no new backup is written into their folders.

    `Storage.clean` handles backups that were never complete. Raises OSError if a folder cannot be renamed.
    """
    completed = storage.completed()
    for point in storage.points():
        if point > after and (point in completed or not storage.is_unfinished(point)):
            names, number, new = {*files.list_folder(storage.folder)}, 1, _DAMAGED + point.folder
            while new in names:
                number, new = number + 1, f"{_DAMAGED}{point.folder}-{number + 1}"
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
