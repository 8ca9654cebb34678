"""`BackupOptions`: how a training is backed up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError, format_value
from tfdist.runtime.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class BackupOptions:
    """How a training is backed up; `BackupAndRestore` describes the arguments, which are the same.

    Raises:
        ConfigError: A value is out of range, or `backup_dir` is a file.
    """

    backup_dir: str
    save_freq: str | int
    save_every_seconds: float | None
    keep: int
    delete_checkpoint: bool
    save_before_preemption: bool
    grace_seconds: float
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ConfigError(faults)

    @functools.cached_property
    def preemption(self) -> Preemption | None:
        """Receives SIGTERM; None leaves the signal alone."""
        return Preemption(self.grace_seconds) if self.save_before_preemption else None

    def _faults(self) -> Iterator[str]:
        folder, save_freq = self.backup_dir, self.save_freq
        if not folder:
            yield "backup_dir must be a folder. Received: ''."
        try:
            if tf.io.gfile.exists(folder) and not tf.io.gfile.isdir(folder):
                yield f"backup_dir must be a folder, and {folder!r} is a file."
        except tf.errors.OpError as e:  # a scheme that is not known
            yield f"backup_dir must be a folder that TensorFlow can reach. Received: {format_value(folder)} ({e.message.splitlines()[0]})."
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and not whole:
            yield f"save_freq must be 'epoch' or a number of steps, 1 or more. Received: {save_freq!r}."
        if self.save_every_seconds is not None and not self.save_every_seconds > 0:
            yield f"save_every_seconds must be more than 0, or None. Received: {self.save_every_seconds!r}."
        if not isinstance(self.keep, int) or self.keep < 1:
            yield f"keep must be 1 or more. Received: {self.keep!r}."
        if not self.grace_seconds > 0:
            yield f"grace_seconds must be more than 0. Received: {self.grace_seconds!r}."
