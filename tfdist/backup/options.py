"""`BackupOptions`: what a backed-up `fit` is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.runtime.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class BackupOptions:
    """What a backed-up `fit` is told; `BackupAndRestore` describes the arguments of the same names.

    Attributes:
        save_freq: `"epoch"`, or a number of steps.
        save_every_seconds: Save also after this many seconds; None or 0 means never.
        keep: How many backups to keep.
        preemption: Receives SIGTERM; None leaves the signal alone.
        config: Values that must be the same in the run that resumes.
        defaults: Values of `config` for backups that do not have them.
    """

    save_freq: str | int
    save_every_seconds: float | None
    keep: int
    preemption: Preemption | None
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
