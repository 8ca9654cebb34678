"""Backups of tasks that do not share a folder: the chief stores the parts of all ranks, and sends them at the start.

So the loss of any host except the chief's loses no state. The other hosts need no files, and hosts may be exchanged between two runs.
Only the chief's folder is read. A newer backup in another host's folder is an error, because the chief may have moved to another host.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from tfdist.aliases import Json
from tfdist.backup.contents import BEFORE_ALL, SavePoint
from tfdist.backup.files import ReadError
from tfdist.backup.storage import STATE_FILE, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.errors import ConfigError
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.folders.claim import Claim, is_alive
from tfdist.runtime.log import logger

_ALIGNMENT = 8  # bytes
# The file systems of disks that no second host can mount at the same time.
_OWN_DISKS = {"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def is_on_own_disk(folder: str) -> bool:
    """Returns whether a local folder is certainly on a disk of this host alone; False if that is unknown."""
    try:
        types = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
        path = pathlib.Path(folder).resolve()
    except (OSError, psutil.Error):
        return False
    mount = next((str(parent) for parent in (path, *path.parents) if str(parent) in types), "")
    return types.get(mount) in _OWN_DISKS


def announce(folder: str, ranks: Ranks, blind: Sequence[int]) -> None:
    """Logs once that the chief stores all backups; `blind` are the ranks that do not see the chief's files."""
    if ranks.is_chief:
        names = ", ".join(ranks.names[rank] for rank in blind)
        logger.info(
            f"the tasks do not share backup_dir {folder!r} ({names} on another disk): the chief stores the backups of all tasks on its host, and "
            "sends them at the start. A shared folder or a URL (s3://, gs://) would survive the loss of the chief's host."
        )


def check_others(storage: Storage, ranks: Ranks, points: Sequence[SavePoint], is_blind: bool) -> None:
    """Raises ConfigError, on all ranks, if a rank's own folder has a newer backup than the chief's, or belongs to another run. A collective.

    `points` are the backups in this rank's folder. `is_blind` says that this rank does not see the chief's folder.
    """
    newest = max(filter(storage.is_complete, points), default=BEFORE_ALL)
    chiefs = point_of_chief(ranks, newest)
    newer = ""
    owner = ""
    if is_blind:
        if newest > chiefs:
            newer = storage.path(newest)
        owner = Claim(storage.folder, "backup_dir").owner() or ""
        if not is_alive(owner):
            owner = ""
    newer = ranks.agree(newer)
    if newer:
        chief_has = "the chief has none"
        if chiefs != BEFORE_ALL:
            chief_has = f"the chief's newest is {chiefs.folder}"
        raise ConfigError(
            f"The tasks do not share backup_dir {storage.folder!r}, and another host holds a newer backup than the chief's: {newer}; {chief_has}. "
            "Start the chief on that host, or copy the folder to the chief's host; to continue without that backup, remove it there."
        )
    owner = ranks.agree(owner)
    if owner:
        raise ConfigError(
            f"backup_dir {storage.folder!r} on another host than the chief's belongs to another run, which has not ended: {owner}. Give each run "
            "its own backup_dir, or end that process first."
        )


def remove_stale(storage: Storage, ranks: Ranks) -> None:
    """Removes old backups from the folders of hosts other than the chief's, to which this run will not write. A collective.

    Backups that the chief's folder has, too, stay: if storage is slow to show changes, both folders may be the same.
    """
    points = json.dumps(storage.points()) if ranks.is_chief else ""
    chiefs = ranks.gather_texts(points)[0]
    if ranks.is_chief:
        return
    try:
        stale = set(storage.points()) - {SavePoint(*point) for point in json.loads(chiefs)}
        for point in stale:
            storage.remove(point, every_rank=True)
        if stale and not storage.points():
            urls.remove(os.path.join(storage.folder, STATE_FILE))
    except (OSError, ReadError):  # the next start tries again
        pass


def point_of_chief(ranks: Ranks, point: SavePoint) -> SavePoint:
    """Returns the chief's save point. A collective."""
    step, epoch_ended = ranks.gather(*point)[0]
    return SavePoint(int(step), bool(epoch_ended))


def gather_parts(ranks: Ranks, own: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Returns, on the chief, the parts of all ranks by rank; empty on the others. A collective.

    The chief holds the parts of all ranks until they are written.
    """
    parts: dict[int, Mapping[str, Any]] = {}
    if ranks.is_chief:
        parts[0] = own
    for rank in range(1, ranks.size):
        content = pack({}, own) if rank == ranks.rank else ()
        received = ranks.send(rank, content, target=0)
        if received is not None:
            parts[rank] = unpack(received)[1]
    return parts


def send_parts(
    ranks: Ranks, manifest: Json, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Returns the chief's manifest and shared part, and this rank's own part. A collective.

    `parts` are the own parts of all ranks, by rank; or one part, which all ranks receive. Other ranks' arguments are ignored.
    """
    content = pack(manifest, shared) if ranks.is_chief else ()
    received = ranks.send(0, content)
    if received is not None:
        manifest, shared = unpack(received)
    own: Mapping[str, Any] = {}
    if ranks.is_chief:
        own = parts[0]
    targets: Sequence[int | None] = range(1, ranks.size)
    if ranks.broadcast_scalar(len(parts)) == 1:
        targets = [None]
    for target in targets:
        content = pack({}, parts[target or 0]) if ranks.is_chief else ()
        received = ranks.send(0, content, target)
        if received is not None:
            own = unpack(received)[1]
    return manifest, shared, own


def pack(values: Json, tensors: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns arrays of bytes: a header with the values, names, types and shapes, and the tensors."""
    entries: list[Any] = []
    arrays: list[np.ndarray] = []
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        dtype = ""  # of texts, whose bytes TensorFlow serializes, because they have no fixed length
        if array.dtype.kind in "OSU":
            serialized = tf.io.serialize_tensor(tf.convert_to_tensor(tensor, tf.string)).numpy()
            flat = np.frombuffer(serialized, np.uint8)
        else:
            dtype = tf.as_dtype(array.dtype).name
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        entries.append([name, dtype, array.shape, len(flat)])
        arrays += [flat, np.zeros(-len(flat) % _ALIGNMENT, np.uint8)]
    header = json.dumps([values, entries]).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return [np.array([len(header)], np.int64).view(np.uint8), np.frombuffer(header, np.uint8), *arrays]


def unpack(content: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """Returns the values and tensors that `pack` has packed; the tensors are views of `content`."""
    start = 8 + int(content[:8].view(np.int64)[0])
    values, entries = json.loads(content[8:start].tobytes())
    tensors: dict[str, Any] = {}
    for name, dtype, shape, length in entries:
        flat = content[start : start + length]
        if dtype:
            tensors[name] = flat.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
        else:
            tensors[name] = tf.io.parse_tensor(flat.tobytes(), tf.string).numpy()
        start += length + -length % _ALIGNMENT
    return values, tensors
