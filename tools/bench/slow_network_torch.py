"""One task of `tools.bench.slow_network` under PyTorch's DDP. Arguments: output folder, options as JSON."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tfdist.tasks import digits
from tools.bench import slow_network, turns

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
WORKERS, RANK = turns.cluster()
torch.set_num_threads(len(os.sched_getaffinity(0)))  # as TensorFlow has
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
distributed.init_process_group("gloo", f"file://{FOLDER}/rendezvous", rank=RANK, world_size=len(WORKERS))
(x, y), (images, labels) = [
    (torch.from_numpy(each.reshape(len(each), -1)), torch.from_numpy(target).long()) for each, target in digits.load()
]


def train(seed: int) -> dict[str, object]:
    """Trains a model until the target."""
    torch.manual_seed(seed)
    inner, outer, classes = slow_network.WIDTHS[0], slow_network.WIDTHS[1], slow_network.WIDTHS[-1]
    layers = [nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer), nn.ReLU(), nn.Linear(outer, classes)]
    # PowerSGD's hook aborts over gloo with more than one bucket.
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True, bucket_cap_mb=10_000)
    if OPTIONS["hook"]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), slow_network.LEARNING_RATE, slow_network.MOMENTUM)
    order, loss_of = np.random.default_rng(seed), nn.CrossEntropyLoss()
    drawn: list[int] = []
    seconds, before, reached, step = 0.0, turns.sent(), False, 0
    while not reached and step < slow_network.MOST_STEPS:
        if len(drawn) < slow_network.BATCH:
            drawn = list(order.permutation(len(x)))
        batch, drawn = drawn[: slow_network.BATCH], drawn[slow_network.BATCH :]
        mine = batch[RANK :: len(WORKERS)]
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if step:
            seconds += time.perf_counter() - began
        step += 1
        if step % slow_network.EVERY == 0:
            with torch.no_grad():
                accuracy = (model.module(images).argmax(-1) == labels).float().mean()
            reached = bool(accuracy >= slow_network.TARGET)
    return {"seconds": seconds, "steps": step, "reached": reached, "sent": (turns.sent() - before) / 1e6}


found = [train(seed) for seed in range(OPTIONS["seeds"])]
if RANK == 0:
    (FOLDER / "results.json").write_text(json.dumps({"runs": found}))
distributed.barrier()
os._exit(0)
