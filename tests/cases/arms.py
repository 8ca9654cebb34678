"""Arms: the strategies, devices and workers that cases run with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arm:
    """A strategy on a number of devices and workers.

    Attributes:
        name: Its name in the words of the program and in the files of tests.
        strategy: As of `tfdist.Trainer`.
        devices: The devices of each worker.
        workers: The number of workers; parameter servers have one, and two servers.
        threads: For each rank the number of threads of TensorFlow's operations, if it matters.
        transport: The transport of gradients, if it is not chosen by itself.
        pieces: Whether the workers hold each kernel in pieces, by a layout map.
        on_gpus: Whether the CPU devices stand in for GPUs: collectives take the ways of GPUs, but for NCCL's kernels.
    """

    name: str
    strategy: str
    devices: int = 1
    workers: int = 1
    threads: tuple[int, ...] = ()
    transport: str = ""
    pieces: bool = False
    on_gpus: bool = False


ONE_DEVICE = Arm("one_device", "one_device")
MIRRORED = Arm("mirrored", "mirrored", devices=2)
FOUR_DEVICES = Arm("four_devices", "mirrored", devices=4)
WORKERS = Arm("workers", "multi_worker_mirrored", workers=2)
TWO_EACH = Arm("two_each", "multi_worker_mirrored", devices=2, workers=2)
THREE_WORKERS = Arm("three_workers", "multi_worker_mirrored", workers=3)
UNLIKE_THREADS = Arm("unlike_threads", "multi_worker_mirrored", workers=2, threads=(1, 4))
SERVERS = Arm("servers", "parameter_server")
GRPC = Arm("grpc", "multi_worker_mirrored", workers=2, transport="grpc")
PIECES = Arm("pieces", "multi_worker_mirrored", workers=2, pieces=True)
ON_GPUS = Arm("on_gpus", "multi_worker_mirrored", workers=2, on_gpus=True)
TWO_GPUS_EACH = Arm("two_gpus_each", "multi_worker_mirrored", devices=2, workers=2, on_gpus=True)
PIECES_ON_GPUS = Arm("pieces_on_gpus", "multi_worker_mirrored", workers=2, pieces=True, on_gpus=True)
ALL = (MIRRORED, WORKERS, TWO_EACH, SERVERS)  # what users begin with
ARMS = {
    arm.name: arm
    for arm in (
        ONE_DEVICE,
        MIRRORED,
        FOUR_DEVICES,
        WORKERS,
        TWO_EACH,
        THREE_WORKERS,
        UNLIKE_THREADS,
        SERVERS,
        GRPC,
        PIECES,
        ON_GPUS,
        TWO_GPUS_EACH,
        PIECES_ON_GPUS,
    )
}
