"""The callback `Goodput`: the share of a run's wall time that went into training steps, and where the rest went."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras

from tfdist.aliases import Logs
from tfdist.runtime import goodput, progress


class Goodput(keras.callbacks.Callback):
    """Counts the wall time of a run by part, over its restarts; give it to `fit` of the whole run.

    Each moment since the process began belongs to one part: `steps` (the training's steps, with the exchange of gradients
    and the callbacks between two), `input_wait` (steps that wait for their batch; not with parameter servers, whose workers go on
    meanwhile), `startup` (until the first step: imports, the cluster, the model, the backup that is
    restored), `compilation` (the first execution of the training's and of the validation's function), `validation`, `saving`
    (backups, as far as steps wait for them, and the model's file) and `other` (between epochs, and after the training). With
    a file, a run that was interrupted goes on: the steps that were trained after the last backup become `repeated_steps`, and the
    time from a task's end to its next process's begin `restarts`, if a supervisor has restarted it; a run that was started again
    later by hand counts without the time between.

    The parts are ml-goodput-measurement's, as far as they can be told apart here.

    Args:
        path: A local file in which the parts outlive this process; on one task alone. None keeps none.

    Examples:
        >>> from tfdist.monitoring import Goodput
        >>> sorted(Goodput().report())
        ['productive', 'seconds', 'wall_seconds']
    """

    only_observes = True

    def __init__(self, path: str | os.PathLike[str] | None = None):
        super().__init__()
        self._path, self._record = path, path
        launched = progress.launched() if not progress.restarts() else 0.0
        self._ledger = goodput.Ledger(launched or None)
        self._before = goodput.read(path) if path is not None else None
        self._saved_steps: float | None = None  # seconds of steps that the restored backup holds
        self._compiled: set[str] = set()
        self._waited = 0.0  # seconds that steps of the model's training function have waited for data
        goodput.set_ledger(self._ledger)

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a backup."""
        return {"steps": self._ledger.now()["steps"]}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the state from `state_dict`."""
        self._saved_steps = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._go_on()
        self._begin("train", "steps")

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._compiled.add("train")
        waited = getattr(self.model.train_function, "input_seconds", 0.0)
        if waited >= self._waited:  # else it is another function
            self._ledger.move(waited - self._waited, "input_wait")
        self._waited = waited
        self._ledger.switch("steps")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._ledger.switch("other")

    def on_test_begin(self, logs: Logs = None) -> None:
        self._begin("test", "validation")

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if "test" not in self._compiled:
            self._begin("test", "validation", compiled=True)

    def on_test_end(self, logs: Logs = None) -> None:
        self._ledger.switch("other")

    def _begin(self, function: str, part: str, compiled: bool = False) -> None:
        if compiled:
            self._compiled.add(function)
        self._ledger.switch(part if function in self._compiled else "compilation")

    def _go_on(self) -> None:
        """At the first epoch of this process: counts on from the process before it, if this one continues from there."""
        if self._path is None:
            return
        path, self._path = self._path, None
        before, restarted = self._before, progress.restarts() > 0
        if restarted and (before is None or before.until < progress.launched()):  # no process has come so far yet
            before = goodput.Record(progress.launched(), dict.fromkeys(goodput.PARTS, 0.0))
        if before is not None and (restarted or self._saved_steps is not None):
            self._ledger.go_on(before, self._saved_steps or 0.0, gap=restarted)
        self._ledger.keep(path)

    def delete(self) -> None:
        """Removes the file of a run that has ended."""
        self._ledger.close()
        if self._record is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._record)

    def report(self) -> dict[str, Any]:
        """Returns `wall_seconds`, `productive` (the share of `steps` in it) and `seconds` by part."""
        self._go_on()  # where a backup held the whole training
        seconds = self._ledger.now()
        wall = sum(seconds.values())
        return {
            "wall_seconds": round(wall, 2),
            "productive": round(seconds["steps"] / wall, 4) if wall else None,
            "seconds": {part: round(value, 2) for part, value in seconds.items()},
        }
