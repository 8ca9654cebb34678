"""`BackupConfig`: when and where to save backups of a training run. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator

from tfdist.config.constraints import MOST_SECONDS, at_least, between, checked, matches, option
from tfdist.errors import format_value
from tfdist.runtime.folders.storage import faults as url_faults
from tfdist.runtime.folders.storage import is_url

_SAVE_FREQ = matches("'epoch', 'never' or a number of steps, 1 or more", "epoch|never|0{0,9}[1-9][0-9]{0,14}")


def folder_faults(field: str, path: str) -> Iterator[str]:
    """Yields the reason why a path cannot be a folder. A folder that does not exist yet is no error.

    Args:
        field: The field's name, for the message.
        path: The path or URL; empty means the default folder.
    """
    if is_url(path):
        yield from url_faults(field, path)
        return
    if "\0" in path:
        yield f"{field} must be a folder, and a path has no null character. Received: {format_value(path)}."
        return
    try:
        if not stat.S_ISDIR(os.stat(path or ".").st_mode):
            yield f"{field} must be a folder, and {format_value(path)} is a file."
    except UnicodeEncodeError:
        yield f"{field} must be a folder, and a path has no lone surrogates. Received: {format_value(path)}."
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            yield f"{field} must be a folder, and its name is too long. Received: {format_value(path)}."
        elif os.path.islink(path):
            yield f"{field} must be a folder, and {format_value(path)} is a link to a folder that does not exist."
        elif e.errno == errno.ENOTDIR:
            yield f"{field} must be a folder, and a parent folder of it is a file. Received: {format_value(path)}."


@dataclasses.dataclass
class BackupConfig:
    """Schedule and folder of the backups of a training run; see `tfdist.BackupAndRestore`.

    Attributes:
        save_freq: When to save: `"epoch"` (at the end of each epoch), a number of steps between backups (`"100"`), or `"never"`.
        save_every_seconds: Also save when this many seconds have passed since the last backup; 0 means never.
        dir: The folder of the backups, shared by all tasks: a path, or a URL such as `s3://bucket/run`. Empty means `backup` in the work directory.
        keep: Number of backups to keep.
        delete_checkpoint: Whether to remove the backups once all results are written.
        save_before_preemption: Whether all tasks save, and exit with code 75, when any task receives SIGTERM.

    Examples:
        >>> from tfdist.config import BackupConfig
        >>> BackupConfig(save_freq="100").save_freq
        '100'
    """

    save_freq: str = option("epoch", *_SAVE_FREQ)
    save_every_seconds: float = option(0.0, *between(0, MOST_SECONDS, off=True))
    dir: str = checked("", folder_faults)
    keep: int = option(2, *at_least(1))
    delete_checkpoint: bool = True
    save_before_preemption: bool = True
