"""The callback `WireBytes`: the bytes that training steps send over the network, by the counters of this process's sockets."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import struct
from collections.abc import Callable

import keras

from tfdist.aliases import Logs
from tfdist.cluster import ClusterSpec, TaskSpec

_SOCKETS = "/proc/self/fd"
_SENT = 200  # the offset of tcpi_bytes_sent in Linux' `struct tcp_info`, since 4.19
_INFO_SIZE = _SENT + 8
# Reading the counters takes some 0.2 ms: after the first _FIRST reads, they are read every _EVERY steps.
_FIRST = 16
_EVERY = 10


class WireBytes(keras.callbacks.Callback):
    """Callback that measures the bytes a rank sends per training step over its TCP connections (Linux).

    Other programs of the host do not count, nor do bytes in shared memory and the headers of packets.

    Args:
        cluster: The cluster.
        task: This process's task.
        read: Returns the bytes sent so far by each connection of this process.
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
        self._has_peers = len(cluster.training_tasks()) > 1
        self._last: tuple[int, dict[str, int]] | None = (
            None  # the step after which the counters were read, and their values
        )
        self._step = 0
        self._begins = begins
        self._has_begun = begins == 0
        self._reads = 0  # number of reads since compression has started
        self._is_counted = (
            False  # False while no read has found a connection: the system does not count, or there is none
        )
        self._reset()

    def _reset(self) -> None:
        # Index 0: steps before compression; index 1: steps with it.
        self._bytes = [0, 0]
        self._steps = [0, 0]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._step = batch
        if self._last is None or self._reads < _FIRST or batch - self._last[0] >= _EVERY:
            self._count(batch)

    def _count(self, step: int) -> None:
        now = self._read()
        self._is_counted |= bool(now)
        phase = self._has_begun
        if not phase:
            updates = int(self.model.optimizer.iterations.numpy())
            self._has_begun = updates >= self._begins
            if updates > self._begins:  # an execution of several steps may contain both kinds of steps
                self._last = None
        if self._last is not None:
            before = self._last[1]
            self._bytes[phase] += sum(sent - before.get(name, 0) for name, sent in now.items())
            self._steps[phase] += step - self._last[0]
        self._last = step, now
        # Reads before compression do not count: its own first steps are read one by one, too.
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
        mean = self._per_step(sum(self._bytes), sum(self._steps))
        self._reset()
        return mean

    def _mean(self, phase: int) -> int | None:
        return self._per_step(self._bytes[phase], self._steps[phase])

    def _per_step(self, sent: int, steps: int) -> int | None:
        # Zero is a measured value: between workers that share memory, some steps send nothing over the network.
        if not (self._has_peers and self._is_counted and steps):
            return None
        return round(sent / steps)


def read_sent_bytes() -> dict[str, int]:
    """Returns the bytes that each TCP connection of this process has sent, by its inode; empty if the system does not count them."""
    counts = {}
    for path in pathlib.Path(_SOCKETS).glob("*"):  # there are none if the system is not Linux
        # Another thread may close it at any time.
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
                inode = str(os.fstat(connection.fileno()).st_ino)
            if len(info) == _INFO_SIZE:
                (counts[inode],) = struct.unpack_from("=Q", info, _SENT)
    return counts
