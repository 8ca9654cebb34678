"""Search for the newest complete backup, with the same result on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.backup import contents, files, pieces, unshared
from tfdist.backup.contents import BEFORE_ALL, SavePoint, part_of
from tfdist.backup.files import CorruptBackupError, UnfinishedBackupError, UnreadableBackupError
from tfdist.backup.state import is_of_replica
from tfdist.backup.storage import REMEDY, STATE_FILE, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.log import logger

SHARED_WITHIN = 30.0  # seconds within which a file of the chief must be visible to the other tasks
PATIENCE = 10.0  # seconds for which an unreadable file is tried again
RETRY_EVERY = 0.5
PROBE_PAUSES = (1.0, 2.0)  # seconds between attempts to write to a URL
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

    `had_backup` says that this run wrote a backup before it was restarted. `reach` is the result of `check_folder`, if the caller has it.
    Raises ConfigError if the folder cannot be used, or a backup belongs to another cluster or user. Raises BackupError if backups existed but
    none is complete, or if a backup cannot be read.
    """
    reach = reach or check_folder(storage, ranks)
    points, completed = _agreed(ranks, storage.folder, _attempt(lambda: list_backups(storage, reach.owners)))
    readers: Sequence[int] = [ranks.rank]
    if not reach.is_shared:
        unshared.check_others(storage, ranks, points, reach.is_blind)
        # The chief reads the parts of all ranks, and sends them; it ignores what the others have in their folders.
        readers = range(ranks.size)
        if not ranks.is_chief:
            readers = []
            completed = set()
    snapshot: Snapshot | None = None
    torn: list[str] = []
    untried = iter(points)
    while snapshot is None:
        # All ranks try the chief's backups: network storage may list others on another host.
        point = unshared.point_of_chief(ranks, next(untried, BEFORE_ALL))
        if point == BEFORE_ALL:
            break
        outcome = _Outcome(_READ, Parts({}, {}, []))
        if readers:  # else the chief reads, and will send this rank's parts
            read = functools.partial(read_backup, storage, point, reach.owners, point in completed, size, readers)
            outcome = _attempt(read)
        parts: Parts | None = _agreed(ranks, storage.path(point), outcome)
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
        if outcome.code == _READ:
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
    # Set at the first failure, because a single read may take longer to fail than all retries.
    deadline = None
    while True:
        try:
            return _Outcome(_READ, read())
        except CorruptBackupError as e:
            return _Outcome(_TORN, why=str(e))
        except ConfigError as e:
            return _Outcome(_REFUSED, why=str(e))
        except UnreadableBackupError as e:
            if deadline is None:
                deadline = time.monotonic() + PATIENCE
                logger.warning(f"{e}; trying again for {PATIENCE:.0f} s")
            elif time.monotonic() >= deadline:
                return _Outcome(_UNREADABLE, why=str(e))
            time.sleep(min(RETRY_EVERY, PATIENCE))


def _agreed(ranks: Ranks, path: str, outcome: _Outcome) -> Any:
    """Returns this rank's value if all ranks could read theirs, and None if any rank read damaged data. A collective.

    Raises, on all ranks, ConfigError if any rank raised a ConfigError, and BackupError if any rank cannot read.
    """
    codes = ranks.gather(float(outcome.code))[:, 0]
    worst = int(codes.max())
    if worst == _READ:
        return outcome.value
    if worst == _TORN:
        return None
    why = outcome.why if outcome.code == worst else ""
    fault = ranks.agree(why)
    if worst == _REFUSED:
        raise ConfigError(fault)
    raise BackupError(
        f"{fault}. The backup may be whole, so the training neither starts again nor continues from an older backup, and removes no files. "
        f"Check the storage and the permissions, and start again; to continue without it, remove {path}."
    )


def list_backups(storage: Storage, owners: Collection[int]) -> tuple[list[SavePoint], set[SavePoint]]:
    """Returns the save points of all backups, newest first, and of those that are, or once were, complete; raises ReadError or ConfigError."""
    files.check_owners(os.path.join(storage.folder, STATE_FILE), owners)
    return storage.points(), storage.completed()


class Parts(NamedTuple):
    manifest: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]


def read_backup(
    storage: Storage,
    point: SavePoint,
    owners: Collection[int] | None = None,
    was_complete: bool = True,
    size: Size | None = None,
    readers: Sequence[int] | None = None,
) -> Parts:
    """Returns the manifest, the shared part and the own parts of ranks, after all checks of a backup; one own part if all ranks have the same.

    `owners` are the trusted users, by default those of a process that writes nothing to the folder. `was_complete` says that the backup once
    had a manifest. `size` is that of the run, by default that of
    the backup, and `readers` are the ranks, by default all. Raises CorruptBackupError, UnreadableBackupError, and ConfigError as `find_backup` does.
    """
    path = storage.path(point)
    if not files.is_folder(path):
        raise UnreadableBackupError(f"{path} cannot be read: it is not there")
    if owners is None:
        owners = owners_of(storage.folder)
    files.check_owners(path, owners)
    if not was_complete and storage.is_unfinished(point):
        raise UnfinishedBackupError(f"{path} was not finished")
    manifest = storage.read_manifest(point)
    size = size or Size(manifest["tasks"], manifest["replicas"])
    if readers is None:
        readers = range(size.tasks)
    _check_size(storage, point, manifest, size)
    shared = storage.read_shared(point, manifest["tasks"])
    if size.replicas != manifest["replicas"]:
        readers = readers[:1]  # all ranks have the same own part: the state of all replicas
    parts = [_read_own(storage, point, manifest, rank, size) for rank in readers]
    for own in parts:
        contents.check_tensors(manifest, shared, own, path)
    return Parts(manifest, shared, parts)


def owners_of(folder: str) -> set[int]:
    """Returns the users whose files a process trusts that reads a folder of backups and writes nothing to it."""
    owners = {0, os.geteuid()}
    if files.is_local(folder) and not unshared.is_on_own_disk(folder):
        try:
            # Network storage may show another id of this user; it then shows the same id for the folder.
            owners.add(os.stat(folder).st_uid)
        except OSError as e:
            raise files.unreadable(folder, e) from e
    return owners


def _read_own(
    storage: Storage, point: SavePoint, manifest: Mapping[str, Any], rank: int, size: Size
) -> dict[str, np.ndarray]:
    """Returns the state of this rank and of its replicas, from the parts of all ranks that had these replicas.

    If the number of replicas has changed, returns the state of all replicas: it is combined once the model is built.
    """
    tasks = manifest["tasks"]
    first_part = 0
    parts = range(tasks)
    if size.replicas == manifest["replicas"]:
        first_part = rank * tasks // size.tasks
        # In a mesh several tasks have the same replica, in an order that depends on the mesh: its state is taken from any part.
        if size.replicas >= max(tasks, size.tasks):
            parts = range(first_part, -(-(rank + 1) * tasks // size.tasks))
    # The state of a task, rather than of its replicas, comes from one part only.
    own = storage.read_part(point, part_of(first_part))
    for part in parts:
        if part != first_part:
            tensors = storage.read_part(point, part_of(part))
            own |= {name: value for name, value in tensors.items() if is_of_replica(name)}
    return pieces.without_pieces(own)


def check_folder(storage: Storage, ranks: Ranks) -> Reach:
    """Checks that all tasks can write to the folder, and whether they see the chief's files. A collective.

    Raises ConfigError if a task cannot write there, or does not see the chief's files at a URL.
    """
    folder = storage.folder
    is_local = files.is_local(folder)
    own_probe = os.path.join(folder, f"rank-{ranks.rank}.probe")
    why = ""
    owner = 0  # root, whose files are trusted anyway: files at a URL have no owner
    try:
        urls.make_folder(folder)
        files.discard_irregular(own_probe)
        urls.with_retries(lambda: urls.write(own_probe, b"x"), PROBE_PAUSES)
        if is_local:
            owner = os.lstat(own_probe).st_uid
    except OSError as e:
        why = files.first_line(e)
    owners, failed = ranks.gather(float(owner), float(bool(why))).T
    # A rank removes its probe only after all ranks have looked for the chief's.
    sees_chief = failed.any() or _sees_chief(folder)
    blind = np.flatnonzero(ranks.gather(float(not sees_chief))[:, 0]).tolist()
    try:
        urls.remove(own_probe)
    except urls.StorageError:  # the next start overwrites it
        pass
    if failed.any():
        check = "Is there space, and permission to write?" if is_local else _CHECK_URL
        raise ConfigError(f"backup_dir {folder!r} cannot be written to: {ranks.agree(why)}. {check} {_NO_SHARED}")
    if blind and not is_local:
        raise ConfigError(
            f"backup_dir {folder!r} must be a folder that all tasks share, but task {', '.join(map(str, blind))} does not see the chief's "
            f"files there. {_NO_SHARED}"
        )
    if blind:
        unshared.announce(folder, ranks, blind)
    trusted = frozenset({0, os.geteuid(), *map(int, owners)})
    return Reach(trusted, is_shared=not blind, is_blind=ranks.rank in blind)


def _sees_chief(folder: str) -> bool:
    """Returns whether the chief's probe is there, or appears within the time that network storage may need to show it."""
    # The chief has written its file, so a disk of this host would show it at once.
    patience = 0.0 if unshared.is_on_own_disk(folder) else SHARED_WITHIN
    deadline = time.monotonic() + patience
    while True:
        try:
            if urls.exists(os.path.join(folder, "rank-0.probe")):
                return True
        except urls.StorageError:
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def _check_size(storage: Storage, point: SavePoint, manifest: Mapping[str, Any], size: Size) -> None:
    tasks = manifest["tasks"]
    replicas = manifest["replicas"]
    if size.is_fixed and (tasks, replicas) != (size.tasks, size.replicas):
        raise ConfigError(
            f"The backup {storage.path(point)} was made with tasks: {tasks}, replicas: {replicas}; this run has tasks: {size.tasks}, replicas: "
            f"{size.replicas}. Under parameter servers start as many tasks as before; {REMEDY.format(storage.folder)}"
        )
