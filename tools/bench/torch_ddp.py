"""PyTorch's DistributedDataParallel over gloo, as a contender."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tools.bench import models

_ONE_BUCKET_MB = 10_000


def join(folder: pathlib.Path, rank: int, size: int) -> None:
    """Makes the process group, once."""
    if not distributed.is_initialized():
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as TensorFlow has
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=size)


def step(hook: str, examples: np.ndarray, labels: np.ndarray, batch: int) -> Callable[[], Any]:
    """Returns a training step of the MLP.

    Args:
        hook: Nothing, `"bf16"`, `"fp16"`, or `"powersgd"` with a rank as in `"powersgd r4"`.
        examples: `[n, features]` float32.
        labels: `[n]` int32.
        batch: Examples of a step.
    """
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(models.MLP):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    name, _, rank = hook.partition(" r")
    # PowerSGD's hook aborts over gloo with more than one bucket.
    model = DistributedDataParallel(
        nn.Sequential(*layers[:-1]), **({"bucket_cap_mb": _ONE_BUCKET_MB} if name == "powersgd" else {})
    )
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name:
        # The wrapper: a CPU build refuses the bf16 hook by its name.
        chosen = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[name]
        model.register_comm_hook(None, lambda group, bucket: chosen(group, bucket))
    optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    x, y = torch.from_numpy(examples).split(batch), torch.from_numpy(labels).long().split(batch)
    batches = itertools.cycle(zip(x, y, strict=True))

    def run() -> float:
        data, target = next(batches)
        optimizer.zero_grad()
        loss = loss_of(model(data), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):  # PowerSGD begins then
        run()
    return run
