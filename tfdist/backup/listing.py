"""Lists of the backups in a folder and their states, without training."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfdist.backup import files, search
from tfdist.backup.contents import SavePoint
from tfdist.backup.files import CorruptBackupError, ReadError, UnfinishedBackupError
from tfdist.backup.storage import Storage
from tfdist.errors import BackupError, ConfigError


@dataclasses.dataclass(frozen=True)
class Listed:
    """A backup in a list.

    Attributes:
        state: `"whole"`, `"unfinished"`, `"damaged"` or `"unreadable"`.
        why: Why the backup is not whole; empty for a whole backup.
        written: When the backup was completed, in seconds since 1970; None if it was not.
        bytes: The total size of the files.
        manifest: The content of the manifest; empty if it cannot be read.
    """

    point: SavePoint
    state: str
    why: str
    written: float | None
    bytes: int
    manifest: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """Returns the backup as plain values, for JSON."""
        config = self.manifest.get("about", {}).get("config", {})
        return {
            "backup": self.point.folder,
            "step": self.point.step,
            "epoch": self.manifest.get("position", {}).get("epoch"),
            "written": self.written,
            "tasks": self.manifest.get("tasks"),
            "replicas": self.manifest.get("replicas"),
            "bytes": self.bytes,
            "state": self.state,
            "why": self.why,
            "task": config.get("task"),
            "strategy": self.manifest.get("strategy"),
        }


def read(folder: str) -> list[Listed]:
    """Reads all files of the backups in a folder; returns the backups, newest first. Skips backups that are being removed."""
    storage = Storage(folder, 0, 1)
    try:
        owners = search.owners_of(folder)
        points, completed = search.list_backups(storage, owners)
    except ReadError as e:
        raise BackupError(f"{e}") from e
    backups = [_read(storage, point, owners, point in completed) for point in points]
    # Check after the files were read, because another task may have removed them in the meantime.
    return [backup for backup in backups if backup.state == "whole" or not storage.is_removed(backup.point)]


def table(backups: Sequence[Listed]) -> str:
    """Returns backups as a table, followed by a line with the reason for each backup that is not whole."""
    heads = ("backup", "step", "epoch", "written", "tasks", "replicas", "size", "task", "strategy", "state")
    rows: list[tuple[str, ...]] = [heads]
    for backup in backups:
        cells = backup.described()
        cells["size"] = f"{backup.bytes / 1e6:.1f} MB"
        if backup.written is not None:
            cells["written"] = f"{datetime.datetime.fromtimestamp(backup.written):%Y-%m-%d %H:%M:%S}"
        rows.append(tuple("-" if cells[head] is None else str(cells[head]) for head in heads))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{backup.point.folder}: {backup.why}" for backup in backups if backup.why)])


def _read(storage: Storage, point: SavePoint, owners: Collection[int], was_complete: bool) -> Listed:
    state = "whole"
    why = ""
    manifest: Mapping[str, Any] = {}
    written: float | None = None
    with contextlib.suppress(ReadError, ConfigError):  # the call below raises it again
        manifest = storage.read_manifest(point)
    try:
        search.read_backup(storage, point, owners, was_complete)
    except (ReadError, ConfigError) as e:
        why = str(e)
        state = "unreadable"
        if isinstance(e, CorruptBackupError):
            state = "damaged"
        if isinstance(e, UnfinishedBackupError):
            state = "unfinished"
    if storage.is_complete(point):
        written = storage.written_at(point) / 1e9
    return Listed(point, state, why, written, _size(storage, point), manifest)


def _size(storage: Storage, point: SavePoint) -> int:
    total = 0
    for name in files.list_folder(storage.path(point)):
        try:
            total += files.size(os.path.join(storage.path(point), name)) or 0
        except ReadError:  # a link or a folder does not count
            pass
    return total
