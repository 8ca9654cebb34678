"""Lists of the backups in a folder and their states, without training."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.backup import contents, files
from tfdist.backup.contents import SavePoint
from tfdist.backup.files import CorruptBackupError, ReadError, UnreadableBackupError
from tfdist.backup.search import FORMAT
from tfdist.backup.storage import MANIFEST, SHARED, Storage
from tfdist.errors import BackupError


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
        points = storage.points()
    except ReadError as e:
        raise BackupError(f"{e}") from e
    backups = [_read(storage, point) for point in points]
    # Check after the files were read, because another task may have removed them in the meantime.
    return [backup for backup in backups if backup.state == "whole" or not storage.is_removed(backup.point)]


def check_manifest(storage: Storage, point: SavePoint) -> dict[str, Any]:
    """Returns a backup's manifest after a check that all files in it exist. Raises ReadError if the backup is incomplete or of another version."""
    manifest = storage.read_manifest(point)
    if manifest.get("format") != FORMAT:
        raise UnreadableBackupError(f"{storage.path(point)} was written by another version of tfdist")
    contents.check_manifest(manifest, point, storage.path(point, MANIFEST))
    return manifest


def table(backups: Sequence[Listed]) -> str:
    """Returns backups as a table, followed by a line with the reason for each backup that is not whole."""
    heads = ("backup", "step", "epoch", "written", "tasks", "replicas", "size", "task", "strategy", "state")
    rows: list[tuple[str, ...]] = [heads]
    for backup in backups:
        cells = backup.described()
        written = backup.written and f"{datetime.datetime.fromtimestamp(backup.written):%Y-%m-%d %H:%M:%S}"
        cells |= {"written": written, "size": f"{backup.bytes / 1e6:.1f} MB"}
        rows.append(tuple("-" if cells[head] is None else str(cells[head]) for head in heads))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{backup.point.folder}: {backup.why}" for backup in backups if backup.why)])


def _read(storage: Storage, point: SavePoint) -> Listed:
    state, why, manifest = "whole", "", {}
    try:
        if storage.is_unfinished(point):
            state, why = "unfinished", f"{storage.path(point)} was not finished"
        else:
            manifest = check_manifest(storage, point)
            shared = storage.read_part(point, SHARED)
            for rank in range(manifest["tasks"]):
                contents.check_tensors(manifest, shared, storage.read_part(point, f"rank-{rank}"), storage.path(point))
    except CorruptBackupError as e:
        state, why = "damaged", str(e)
    except UnreadableBackupError as e:
        state, why = "unreadable", str(e)
    written = storage.written_at(point) / 1e9 if storage.is_complete(point) else None
    return Listed(point, state, why, written, _size(storage, point), manifest)


def _size(storage: Storage, point: SavePoint) -> int:
    total = 0
    for name in files.list_folder(storage.path(point)):
        try:
            total += files.size(os.path.join(storage.path(point), name)) or 0
        except ReadError:  # a link or a folder does not count
            pass
    return total
