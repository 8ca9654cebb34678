"""The callback `WireBytes`: the bytes that training steps send over the network, by the counters of its interfaces."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import keras

from tfdist.aliases import Logs
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.cluster.spec import split_address

_COUNTERS = "/proc/net/dev"
_LOOPBACK = "lo"
_SENT = 8  # the column
# Reading the counters takes up to 0.1 ms: after the first _FIRST reads, they are read every _EVERY steps.
_FIRST, _EVERY = 16, 10


class WireBytes(keras.callbacks.Callback):
    """Callback that measures the bytes a rank sends per training step, from the counters of this host's network interfaces (Linux).

    The counters include all programs of the host, so other traffic adds to the result. Several ranks on a host get equal
    shares.

    Args:
        cluster: The cluster.
        task: This process's task.
        read: Returns the bytes sent by each interface.
        begins: Number of updates before compression starts; their steps are counted separately.

    Examples:
        >>> from tfdist.cluster import TaskSpec, local_cluster
        >>> from tfdist.monitoring import WireBytes
        >>> callback = WireBytes(local_cluster(workers=2), TaskSpec("worker", 0))  # fit(..., callbacks=[callback])
    """

    only_observes = True  # so that ranks need not agree after each step

    def __init__(
        self,
        cluster: ClusterSpec,
        task: TaskSpec,
        read: Callable[[], dict[str, int]] | None = None,
        begins: int = 0,
    ):
        super().__init__()
        self._read = read or read_sent_bytes
        hosts = [split_address(cluster.address(other))[0] for other in cluster.training_tasks()]
        host, _ = split_address(cluster.address(task))
        self._here = hosts.count(host)
        self._local = self._here == len(hosts)
        # With some peers on this host and others on other hosts, the counters cannot separate a rank's bytes.
        self._tells = len(hosts) > 1 and self._here in (1, len(hosts))
        self._last: tuple[int, int] | None = None  # the step after which the counters were read, and their sum
        self._step = 0
        self._begins = begins
        self._has_begun = begins == 0
        self._reads = 0  # number of reads since compression has started
        # Index 0: steps before compression; index 1: steps with it.
        self._bytes, self._steps = [0, 0], [0, 0]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._step = batch
        if self._last is None or self._reads < _FIRST or batch - self._last[0] >= _EVERY:
            self._count(batch)

    def _count(self, step: int) -> None:
        counters = self._read()
        now = sum(sent for name, sent in counters.items() if (name == _LOOPBACK) == self._local)
        phase = self._has_begun
        if not phase:
            updates = int(self.model.optimizer.iterations.numpy())
            self._has_begun = updates >= self._begins
            if updates > self._begins:  # an execution of several steps may contain both kinds of steps
                self._last = None
        if self._last is not None:
            self._bytes[phase] += now - self._last[1]
            self._steps[phase] += step - self._last[0]
        self._last = step, now
        self._reads += self._has_begun

    @property
    def per_step(self) -> int | None:
        """Bytes that a rank sends per step, compressed if there is a compressor; None if unknown."""
        return self._mean(1)

    @property
    def per_step_before(self) -> int | None:
        """Bytes that a rank sends per step before compression starts; None if unknown."""
        return self._mean(0)

    def take(self) -> int | None:
        """Returns the mean bytes per step since the last call, compressed or not; None if unknown."""
        if self._last is not None and self._last[0] < self._step:
            self._count(self._step)
        sent, steps = sum(self._bytes), sum(self._steps)
        self._bytes, self._steps = [0, 0], [0, 0]
        return self._per_step(sent, steps)

    def _mean(self, phase: int) -> int | None:
        return self._per_step(self._bytes[phase], self._steps[phase])

    def _per_step(self, sent: int, steps: int) -> int | None:
        return round(sent / steps / self._here) if self._tells and steps and sent else None


def read_sent_bytes() -> dict[str, int]:
    """Returns the bytes that each network interface has sent; empty if the system has no counters."""
    if (counters := _counters()) is None:
        return {}
    lines = (line.partition(b":") for line in os.pread(counters, 1 << 20, 0).splitlines()[2:])
    return {name.strip().decode(): int(counts.split()[_SENT]) for name, _, counts in lines}


@functools.cache
def _counters() -> int | None:
    """Returns the descriptor of the counters' file, which stays open because opening takes longer than reading."""
    try:
        return os.open(_COUNTERS, os.O_RDONLY)
    except OSError:
        return None
