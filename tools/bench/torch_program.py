"""One task of PyTorch's DistributedDataParallel over gloo, without TensorFlow. Arguments: output folder, options as JSON.

Rank and size are what TF_CONFIG says. `options`: `hook`, `rounds`, `steps` of a round, `batch`.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import statistics
import sys
import time

import numpy as np
import psutil
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tools.bench import models

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
ROUNDS, STEPS, BATCH = (OPTIONS[name] for name in ("rounds", "steps", "batch"))
HOOK, _, POWER = OPTIONS["hook"].partition(" r")
CLUSTER = json.loads(os.environ["TF_CONFIG"])
RANK, SIZE = CLUSTER["task"]["index"], len(CLUSTER["cluster"]["worker"])
_ONE_BUCKET_MB = 10_000


def made() -> DistributedDataParallel:
    """Returns the MLP, with the hook."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(models.MLP):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    # PowerSGD's hook aborts over gloo with more than one bucket.
    buckets = {"bucket_cap_mb": _ONE_BUCKET_MB} if HOOK == "powersgd" else {}
    model = DistributedDataParallel(nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True, **buckets)
    if HOOK == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(POWER), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif HOOK:
        # The wrapper: a CPU build refuses the bf16 hook by its name.
        chosen = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[HOOK]
        model.register_comm_hook(None, lambda group, bucket: chosen(group, bucket))
    return model


def sent() -> int:
    """Returns the bytes that this task has sent to others."""
    return sum(each.bytes_sent for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo")


torch.set_num_threads(len(os.sched_getaffinity(0)))  # as TensorFlow has
if any(name == "eth0" for name in psutil.net_if_addrs()):  # of the laboratory
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
distributed.init_process_group("gloo", f"file://{FOLDER}/rendezvous", rank=RANK, world_size=SIZE)
rng = np.random.default_rng(RANK)
examples = torch.from_numpy(rng.standard_normal((16 * BATCH, models.MLP[0]), np.float32))
labels = torch.from_numpy(rng.integers(0, models.MLP[-1], len(examples)))
batches = itertools.cycle(zip(examples.split(BATCH), labels.split(BATCH), strict=True))
ddp, loss_of = made(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(ddp.parameters(), 0.01)


def step() -> float:
    """Trains on a batch; returns the loss."""
    data, target = next(batches)
    optimizer.zero_grad()
    loss = loss_of(ddp(data), target)
    loss.backward()
    optimizer.step()
    return loss.item()


for _ in range(3):  # PowerSGD begins then
    step()
seconds, counted = [], 0
for number in range(ROUNDS + 1):
    distributed.barrier()
    mine, before = [], sent()
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        mine.append(time.perf_counter() - began)
    distributed.barrier()
    if number:  # as of the others
        seconds.append(statistics.median(mine))
        counted += sent() - before
if RANK == 0:
    results = {"seconds": seconds, "sent": counted / ROUNDS / STEPS, "tensorflow": "tensorflow" in sys.modules}
    (FOLDER / "results.json").write_text(json.dumps(results))
distributed.barrier()
os._exit(0)
