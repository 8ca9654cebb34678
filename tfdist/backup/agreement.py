"""The agreement of all ranks, at the same step, to save a backup or to save and exit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.ranks import Ranks
from tfdist.runtime.preemption import Preemption


class Agreement:
    """Whether all ranks save or exit after an execution of steps.

    Each rank writes two flags into `strategy.notes`: it is preempted, it is time to save. The training step sums them over the
    ranks, so that all ranks read the same flags at the same step.

    Args:
        ranks: The ranks.
        strategy: The strategy.
        preemption: The listener for SIGTERM, or None.
        peer_preempted: Returns whether another task, which this one cannot do without, is preempted.
        save_every_seconds: Seconds between two backups, or None.
    """

    def __init__(
        self,
        ranks: Ranks,
        strategy: Any,
        preemption: Preemption | None,
        peer_preempted: Callable[[], bool],
        save_every_seconds: float | None,
    ):
        self._ranks = ranks
        self._strategy = strategy
        self._preemption = preemption
        self._peer_preempted = peer_preempted
        self._save_every_seconds = save_every_seconds
        self._saved_at = time.monotonic()

    def prepare(self, model: keras.Model) -> None:
        """Makes the variable of the flags, which the model's step reads."""
        if self._ranks.size == 1:
            return
        if self._strategy.notes is None:
            with tf.device("CPU:0"):
                self._strategy.notes = tf.Variable(tf.zeros(2), trainable=False)
            # A step that was traced before does not read the flags.
            model.train_function = model.test_function = None
        self._strategy.notes.assign(tf.zeros(2))

    @property
    def is_preempted(self) -> bool:
        """Whether this rank, or a task that it needs, was told to exit."""
        return bool(self._preemption and (self._preemption.requested or self._peer_preempted()))

    def can_agree(self, function: Any) -> bool:
        """Returns whether the ranks can agree after an execution of steps.

        Args:
            function: What Keras calls for each execution of steps.
        """
        return self._ranks.size == 1 or hasattr(function, "agreed_flags")

    def agree(self, function: Any) -> tuple[bool, bool]:
        """Returns whether to save and exit, and whether it is time to save; on all ranks the same at the same step.

        Args:
            function: What Keras calls for each execution of steps.
        """
        seconds = self._save_every_seconds
        should_save = bool(self._ranks.is_chief and seconds and time.monotonic() - self._saved_at >= seconds)
        if self._ranks.size == 1:
            return self.is_preempted, should_save
        flags = getattr(function, "agreed_flags", None)
        if self.is_preempted or should_save:
            self._strategy.notes.assign([float(self.is_preempted), float(should_save)])
        if flags is None:
            return False, False
        should_stop, should_save = (flags.numpy() > 0).tolist()
        return should_stop, should_save

    def on_save(self) -> None:
        """Restarts the time until the next backup, and resets the flag that asks for one."""
        self._saved_at = time.monotonic()
        if self._ranks.size > 1:
            self._strategy.notes.assign([float(self.is_preempted), 0.0])
