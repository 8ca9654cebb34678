"""Checks of the content of a backup before its use, because a file may be forged or of another version."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.aliases import Json
from tfdist.backup.data_position import LoopPosition
from tfdist.backup.files import CorruptBackupError, first_line
from tfdist.backup.state import REST, replica_key, replicas_of
from tfdist.errors import format_value

FORMAT = 4
SHARED = "shared"
_MOST_REPLICAS = 1 << 20

_FIELDS = {
    "tasks": int,
    "replicas": int,
    "seed": int,
    "stop_training": bool,
    "position": dict,
    "about": dict,
    "files": dict,
    "training": str,
}
_LATER = {"training"}  # fields that the first versions did not write
_ABOUT = {"fit": dict, "optimizer": dict, "variables": dict}
_REST = {"callbacks": dict, "synchronized": bool}
_FOLDER = re.compile(r"step-(\d+)(-end)?/?")  # some file systems list folders with a slash


class SavePoint(NamedTuple):
    """The point in training at which a backup was taken; a later point compares as greater.

    Attributes:
        step: The number of steps done.
        epoch_ended: Whether the epoch of the last step had ended. A step may have two backups: before and after the end of its epoch.
    """

    step: int
    epoch_ended: bool

    @property
    def folder(self) -> str:
        """The name of the backup's folder."""
        if self.epoch_ended:
            return f"step-{self.step}-end"
        return f"step-{self.step}"

    @classmethod
    def of_folder(cls, name: str) -> SavePoint | None:
        """Returns the save point that a folder's name denotes, or None if the name is not that of a backup."""
        match = _FOLDER.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), bool(match[2]))


BEFORE_ALL = SavePoint(-1, False)  # less than the save point of any backup


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Returns the manifest in a file's content. Raises CorruptBackupError unless its checksum is right and it names the backup's files."""
    body = _json(content, path)
    try:
        is_intact = body.pop("crc32", None) == checksum(body)
    except RecursionError:
        is_intact = False
    if not is_intact:
        raise CorruptBackupError(f"{path} differs from the data written")
    _check_fields(body, {"files": dict}, path)
    for name, entry in body["files"].items():
        if not isinstance(entry, dict) or os.path.basename(name) != name:
            raise CorruptBackupError(f"{path} names {name!r}, which is no file of a backup")
    return body


def check_manifest(manifest: Mapping[str, Any], point: SavePoint, path: str) -> None:
    """Raises CorruptBackupError unless a parsed manifest has all fields and describes `point`, which the folder's name denotes."""
    required = {name: kind for name, kind in _FIELDS.items() if name in manifest or name not in _LATER}
    _check_fields(manifest, required, path)
    _check_fields(manifest["about"], _ABOUT, path, "about")
    for number, optimizer in manifest["about"]["optimizer"].items():
        _check_fields({number: optimizer}, {number: dict}, path, "about.optimizer")
    position = manifest["position"]
    fields = {field.name: int for field in dataclasses.fields(LoopPosition)}
    # Later fields of a position may be absent, and unknown ones are errors.
    required = {name: fields.get(name, type(None)) for name in {"step", "epoch", "epoch_step", *position}}
    _check_fields(position, required, path, "position")
    tasks = manifest["tasks"]
    replicas = manifest["replicas"]
    # In a mesh several tasks have the same replica, else a task has one or more.
    fewer, more = sorted((tasks, replicas))
    if not 0 < fewer <= more <= _MOST_REPLICAS or more % fewer:
        raise CorruptBackupError(
            f"{path} names {format_value(tasks)} tasks and {format_value(replicas)} replicas, which no run could have"
        )
    if not -(1 << 63) <= manifest["seed"] < 1 << 63:  # TensorFlow's seeds are int64
        raise CorruptBackupError(f"{path} has no seed that a backup could have")
    for part in (SHARED, *map(part_of, range(tasks))):
        # The checksum of a part's index covers the part, because the index holds a checksum of each tensor.
        if not isinstance(manifest["files"].get(f"{part}.index", {}).get("crc32"), int):
            raise CorruptBackupError(f"{path} does not name the part {part}")
    if SavePoint(position["step"], position["epoch_step"] == 0) != point:
        raise CorruptBackupError(f"{path} is a copy of that of another backup, of step {position['step']}")


def check_tensors(manifest: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Raises CorruptBackupError unless the shared tensors and those of this rank have the names, shapes and types in the manifest."""
    replicas = replicas_of(own)
    for name, form in manifest["about"]["variables"].items():
        value = shared.get(name)
        if name in replicas:
            value = own[replica_key(replicas[name][0], name)]
        if value is None:
            raise CorruptBackupError(f"{path} does not hold variable {name!r}")
        stored_form = f"{tf.as_dtype(value.dtype).name}{list(value.shape)}"
        if "None" not in str(form) and stored_form != form:
            raise CorruptBackupError(f"{path} holds {name!r} as {stored_form}, and should as {form}")
    if REST not in own:
        raise CorruptBackupError(f"{path} does not hold the state of callbacks")
    rest = _json(np.asarray(own[REST]).item(), path)
    _check_fields({"logs": None, **rest}, _REST, path)
    for name, state in rest["callbacks"].items():
        _check_fields({name: state}, {name: dict}, path, "callbacks")


def part_of(rank: int) -> str:
    """Returns the name of a rank's part."""
    return f"rank-{rank}"


def checksum(body: Mapping[str, Any]) -> int:
    """Returns the checksum of a manifest's fields, without the field for the checksum."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _json(content: Json, path: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, TypeError, RecursionError) as e:
        raise CorruptBackupError(f"{path} differs from the data written: {first_line(e)}") from e
    if not isinstance(body, dict):
        raise CorruptBackupError(f"{path} differs from the data written")
    return body


def _check_fields(body: Mapping[str, Any], fields: Mapping[str, type], path: str, within: str = "") -> None:
    for name, kind in fields.items():
        if not isinstance(body.get(name), kind):
            where = f"{within}.{name}".removeprefix(".")
            raise CorruptBackupError(f"{path} has no {where} that a backup could have")
