"""Search for the newest complete backup, with the same result on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.backup import contents, files, unshared
from tfdist.backup.contents import BEFORE_ALL, SavePoint
from tfdist.backup.files import CorruptBackupError, UnreadableBackupError
from tfdist.backup.state import is_of_replica
from tfdist.backup.storage import MANIFEST, SHARED, STATE_FILE, Storage, part_of
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime import storage as urls
from tfdist.runtime.log import logger

FORMAT = 2
_SHARED_WITHIN = 30.0  # seconds within which a file of the chief must be visible to the other tasks
_PATIENCE = 10.0  # seconds for which an unreadable file is tried again
_RETRY_EVERY = 0.5
_PROBE_PAUSES = (1.0, 2.0)  # seconds between attempts to write to a URL
_CHECK_URL = "Does the bucket exist, can this host reach it, and do the credentials in the environment permit to write?"
_NO_SHARED = (
    "Give a folder or a URL that all tasks reach (backup_dir=..., or for tfdist train --config.backup.dir=...), or train without backups (no "
    "backup_dir, or --config.backup.save_freq=never)."
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a backup: tensors by name, those of all ranks in `shared` and those of this rank and its replicas in `own`."""

    point: SavePoint
    manifest: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


class Size(NamedTuple):
    """The numbers of tasks and replicas of a run. If `is_fixed`, a backup continues only with the same numbers."""

    tasks: int
    replicas: int
    is_fixed: bool = False


class Reach(NamedTuple):
    """The result of `check_folder`: how the tasks reach the backups.

    Attributes:
        owners: The users whose files are trusted: root, this process's user, and the owners of the tasks' own files, because network
            storage may change the owner of a file.
        is_shared: Whether all tasks see the chief's files; equal on all ranks.
        is_blind: Whether this task does not see the chief's files.
    """

    owners: frozenset[int]
    is_shared: bool = True
    is_blind: bool = False


def find_backup(
    storage: Storage, ranks: Ranks, size: Size, had_backup: bool = False, reach: Reach | None = None
) -> Snapshot | None:
    """Reads the newest complete backup; returns None if the folder has never had a backup. A collective.

    `had_backup` says that this run wrote a backup before it was restarted. `reach` is the result of `check_folder`, if the caller has it. Raises ConfigError if the folder cannot be used, or a backup belongs to
    another cluster or user. Raises BackupError if backups existed but none is complete, or if a backup cannot be read.
    """
    reach = reach or check_folder(storage, ranks)
    listed = _agreed(ranks, storage.folder, _attempt(lambda: _list_backups(storage, reach.owners)))
    points, completed = listed or ([], set())
    if not reach.is_shared:
        unshared.check_others(storage, ranks, (points, completed), reach.is_blind)
        if not ranks.is_chief:
            points, completed = [], set()
    snapshot: Snapshot | None = None
    torn: list[str] = []
    next_point = functools.partial(unshared.point_of_chief, ranks)
    readers = [ranks.rank] if reach.is_shared else range(ranks.size if ranks.is_chief else 0)
    while snapshot is None and (point := next_point(points.pop(0) if points else BEFORE_ALL)) != BEFORE_ALL:
        read = functools.partial(_read, storage, point, size, reach.owners, point in completed, readers)
        outcome = _attempt(read)
        parts: _Parts | None = _agreed(ranks, storage.path(point), outcome)
        if parts and reach.is_shared:
            snapshot = Snapshot(point, parts.manifest, parts.shared, parts.own[0])
        elif parts:
            snapshot = Snapshot(point, *unshared.send_parts(ranks, *parts))
        if outcome.code == _TORN:
            torn.append(outcome.why)
            if ranks.is_chief or point in completed:
                logger.warning(f"{outcome.why}; trying the backup before it")
    if snapshot is None and ranks.any(bool(completed)):
        raise BackupError(
            f"{storage.folder!r} holds backups, but none is whole: {'; '.join(torn) or 'see the logs of the other tasks'}. "
            "To train from the beginning, remove that folder."
        )
    if snapshot is None and ranks.any(had_backup):
        raise BackupError(
            f"{storage.folder!r} holds no backup, though this run saved one there before it was restarted. Is its storage mounted? "
            "To train from the beginning, start a new run."
        )
    return snapshot


def read_seed(folder: str) -> int | None:
    """Returns the random seed of the newest readable backup in a folder, or None."""
    storage = Storage(folder, 0, 1)
    for point in _attempt(storage.points).value or ():
        outcome = _attempt(functools.partial(storage.read_manifest, point))
        if outcome.code == _UNREADABLE:
            break  # `find_backup` will raise
        if outcome.code == _READ and isinstance(outcome.value.get("seed"), int):
            return int(outcome.value["seed"])
    return None


class _Outcome(NamedTuple):
    """The outcome of reading on this rank."""

    code: int
    value: Any = None
    why: str = ""


_READ, _TORN, _UNREADABLE, _REFUSED = range(4)  # all ranks act on the highest code of any rank


def _attempt(read: Callable[[], Any]) -> _Outcome:
    """Calls `read`; retries for some seconds if a file is unreadable. Returns errors as an outcome, because the other ranks wait for it."""
    deadline = None  # set at the first failure: a single read may take longer to fail than all retries
    while True:
        try:
            return _Outcome(_READ, read())
        except CorruptBackupError as e:
            return _Outcome(_TORN, why=str(e))
        except ConfigError as e:
            return _Outcome(_REFUSED, why=str(e))
        except UnreadableBackupError as e:
            if deadline is None:
                deadline = time.monotonic() + _PATIENCE
                logger.warning(f"{e}; trying again for {_PATIENCE:.0f} s")
            elif time.monotonic() >= deadline:
                return _Outcome(_UNREADABLE, why=str(e))
            time.sleep(min(_RETRY_EVERY, _PATIENCE))


def _agreed(ranks: Ranks, path: str, outcome: _Outcome) -> Any:
    """Returns this rank's value if all ranks could read theirs, and None if any rank read damaged data. A collective.

    Raises, on all ranks, ConfigError if any rank raised a ConfigError, and BackupError if any rank cannot read.
    """
    codes = ranks.gather(float(outcome.code))[:, 0]
    worst = int(codes.max())
    if worst < _UNREADABLE:
        return outcome.value if worst == _READ else None
    fault = ranks.agree(outcome.why if outcome.code == worst else "")
    if worst == _REFUSED:
        raise ConfigError(fault)
    raise BackupError(
        f"{fault}. The backup may be whole, so the training neither starts again nor continues from an older backup, and removes no files. "
        f"Check the storage and the permissions, and start again; to continue without it, remove {path}."
    )


def _list_backups(storage: Storage, owners: Collection[int]) -> tuple[list[SavePoint], set[SavePoint]]:
    files.check_owners(os.path.join(storage.folder, STATE_FILE), owners)
    return storage.points(), storage.completed()


class _Parts(NamedTuple):
    manifest: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]


def _read(
    storage: Storage,
    point: SavePoint,
    size: Size,
    owners: Collection[int],
    was_complete: bool,
    readers: Sequence[int],
) -> _Parts:
    """Returns the manifest, the shared part and the own parts of the ranks `readers`; one own part if all ranks have the same."""
    if not readers:  # the chief reads, and will send this rank's parts
        return _Parts({}, {}, [])
    path = storage.path(point)
    if not files.is_folder(path):
        raise UnreadableBackupError(f"{path} cannot be read: it is not there")
    files.check_owners(path, owners)
    if not was_complete and storage.is_unfinished(point):
        raise CorruptBackupError(f"{path} was not finished")
    manifest = storage.read_manifest(point)
    _check_format(storage, point, manifest)
    contents.check_manifest(manifest, point, storage.path(point, MANIFEST))
    _check_size(storage, point, manifest, size)
    shared = storage.read_part(point, SHARED)
    is_same = size.replicas != manifest["replicas"]
    parts = [_read_own(storage, point, manifest, rank, size) for rank in (readers[:1] if is_same else readers)]
    for own in parts:
        contents.check_tensors(manifest, shared, own, path)
    return _Parts(manifest, shared, parts)


def _read_own(
    storage: Storage, point: SavePoint, manifest: Mapping[str, Any], rank: int, size: Size
) -> dict[str, np.ndarray]:
    """Returns the state of this rank and of its replicas, from the parts of all ranks that had these replicas.

    If the number of replicas has changed, returns the state of all replicas: it is combined once the model is built.
    """
    per_part = manifest["replicas"] // manifest["tasks"]
    if size.replicas == manifest["replicas"]:
        local = size.replicas // size.tasks
        task_part, last = rank * local // per_part, (rank * local + local - 1) // per_part
        parts = range(task_part, last + 1)
    else:
        task_part, parts = 0, range(manifest["tasks"])
    own: dict[str, np.ndarray] = {}
    for part in parts:
        tensors = storage.read_part(point, part_of(part))
        own |= tensors if part == task_part else {name: tensors[name] for name in tensors if is_of_replica(name)}
    return own


def check_folder(storage: Storage, ranks: Ranks) -> Reach:
    """Checks that all tasks can write to the folder, and whether they see the chief's files. A collective.

    Raises ConfigError if a task cannot write there, or does not see the chief's files at a URL.
    """
    folder = storage.folder
    chief_probe, own_probe = (os.path.join(folder, f"rank-{rank}.probe") for rank in (0, ranks.rank))
    why, owner = "", 0
    try:
        urls.make_folder(folder)
        files.discard_irregular(own_probe)
        urls.with_retries(lambda: urls.write(own_probe, b"x"), _PROBE_PAUSES)
        owner = os.lstat(own_probe).st_uid if files.is_local(own_probe) else 0
    except OSError as e:
        why = files.first_line(e)
    owners, failed = ranks.gather(float(owner), float(bool(why))).T
    # The chief has written its file, so a disk of this host would show it at once.
    deadline = time.monotonic() + (0.0 if unshared.is_on_own_disk(folder) else _SHARED_WITHIN)
    while not failed.any() and not (sees_chief := _is_there(chief_probe)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = ranks.gather(float(not failed.any() and not sees_chief))[:, 0]
    with contextlib.suppress(urls.StorageError):
        urls.remove(own_probe)
    if failed.any():
        check = "Is there space, and permission to write?" if files.is_local(folder) else _CHECK_URL
        raise ConfigError(f"backup_dir {folder!r} cannot be written to: {ranks.agree(why)}. {check} {_NO_SHARED}")
    if blind.any() and not files.is_local(folder):
        raise ConfigError(
            f"backup_dir {folder!r} must be a folder that all tasks share, but task {_numbers(blind)} does not see the chief's files there. "
            f"{_NO_SHARED}"
        )
    if blind.any():
        unshared.announce(folder, ranks, np.flatnonzero(blind).tolist())
    trusted = frozenset({0, os.geteuid(), *map(int, owners)})
    return Reach(trusted, is_shared=not blind.any(), is_blind=bool(blind[ranks.rank]))


def _is_there(path: str) -> bool:
    try:
        return urls.exists(path)
    except urls.StorageError:
        return False


def _numbers(flags: Any) -> str:
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


_REMEDY = "or, to train from the beginning, remove {!r} or choose another backup_dir."


def _check_format(storage: Storage, point: SavePoint, manifest: Mapping[str, Any]) -> None:
    if manifest.get("format") != FORMAT:
        raise ConfigError(
            f"The backup {storage.path(point)} was written by another version of tfdist: it has format {manifest.get('format')}, and this "
            f"version reads format {FORMAT}. Continue with that version; {_REMEDY.format(storage.folder)}"
        )


def _check_size(storage: Storage, point: SavePoint, manifest: Mapping[str, Any], size: Size) -> None:
    tasks, replicas = manifest["tasks"], manifest["replicas"]
    path = storage.path(point)
    if not (0 < tasks <= replicas and replicas % tasks == 0) and not size.is_fixed:
        raise CorruptBackupError(f"{path} names {tasks} tasks and {replicas} replicas, which no run could have")
    if size.is_fixed and (tasks, replicas) != (size.tasks, size.replicas):
        raise ConfigError(
            f"The backup {path} was made with tasks: {tasks}, replicas: {replicas}; this run has tasks: {size.tasks}, replicas: "
            f"{size.replicas}. Under parameter servers start as many tasks as before; {_REMEDY.format(storage.folder)}"
        )
