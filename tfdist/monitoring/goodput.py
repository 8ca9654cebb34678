"""The callback `Goodput`: the wall time of a run by part, and the share of training steps in it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras

from tfdist.aliases import Logs
from tfdist.runtime.report import goodput, progress


class Goodput(keras.callbacks.Callback):
    """Callback that counts the wall time of a run by part, across restarts; pass it to `fit` of the complete run.

    Each moment since the start of the process belongs to one part: `steps` (the training's steps, with the exchange of gradients
    and the callbacks between two steps), `input_wait` (steps that wait for their batch; not with parameter servers, whose workers
    continue meanwhile), `startup` (until the first step: imports, the cluster, the model, restoring the
    backup), `compilation` (the first execution of the training's and of the validation's function), `validation`, `saving`
    (the model's file, and backups while steps wait for them) and `other` (between epochs, and after the training).

    With a file, an interrupted run continues its count. The steps trained after the last backup become `repeated_steps`. If a
    supervisor has restarted the task, the time from its end to its next process becomes `restarts`; if the user has run the
    command again, the time between does not count.

    The parts are those of ml-goodput-measurement that tfdist can distinguish.

    Args:
        path: A local file that stores the parts beyond this process; for one task only. None stores nothing.

    Examples:
        >>> from tfdist.monitoring import Goodput
        >>> sorted(Goodput().report())
        ['productive', 'seconds', 'wall_seconds']
    """

    only_observes = True

    def __init__(self, path: str | os.PathLike[str] | None = None):
        super().__init__()
        self._path = path  # until the count of the file has been continued
        self._record = path
        launched = None if progress.restarts() else progress.launched()
        self._ledger = goodput.Ledger(launched or None)
        self._before = goodput.read(path) if path is not None else None
        self._saved_steps: float | None = None  # seconds of steps that the restored backup holds
        goodput.set_ledger(self._ledger)

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a backup."""
        return {"steps": self._ledger.now()["steps"]}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the state from `state_dict`."""
        self._saved_steps = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._continue_record()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._ledger.now()  # writes the file

    def _continue_record(self) -> None:
        """Continues the previous process's count at the first epoch, if this process continues its training."""
        if self._path is None:
            return
        path = self._path
        self._path = None  # from now on the ledger counts
        before = self._before
        restarted = progress.restarts() > 0
        if restarted and (before is None or before.until < progress.launched()):  # no process has written a record yet
            before = goodput.Record(progress.launched(), dict.fromkeys(goodput.PARTS, 0.0))
        # If the user has run the command again, only a restored backup continues a run.
        if before is not None and (restarted or self._saved_steps is not None):
            self._ledger.continue_from(before, self._saved_steps or 0.0, gap=restarted)
        self._ledger.keep(path)

    def delete(self) -> None:
        """Removes the file of a run that has ended."""
        self._ledger.close()
        if self._record is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._record)

    def report(self) -> dict[str, Any]:
        """Returns `wall_seconds`, `productive` (the share of `steps` in it) and `seconds` by part."""
        self._continue_record()  # needed if the backup contained the complete training, so that no epoch began
        seconds = self._ledger.now()
        wall = sum(seconds.values())
        return {
            "wall_seconds": round(wall, 2),
            "productive": round(seconds["steps"] / wall, 4) if wall else None,
            "seconds": {part: round(value, 2) for part, value in seconds.items()},
        }
