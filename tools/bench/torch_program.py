"""One task of PyTorch's DistributedDataParallel over gloo, without TensorFlow. Arguments: output folder, options as JSON.

Rank and size are what TF_CONFIG says. `options`: `hook`, `rounds`, `steps` of a round, `batch`; `optimizer`, `splits` and
`model`, which may be left out.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tools.bench import models, turns

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
HOOK, _, POWER = OPTIONS["hook"].partition(" r")
WORKERS, RANK = turns.cluster()
_ONE_BUCKET_MB = 10_000


def made() -> DistributedDataParallel:
    """Returns the MLP, with the hook."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(models.WIDTHS[OPTIONS.get("model", "mlp")]):
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


torch.set_num_threads(len(os.sched_getaffinity(0)))  # as TensorFlow has
if turns.in_laboratory():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
distributed.init_process_group("gloo", f"file://{FOLDER}/rendezvous", rank=RANK, world_size=len(WORKERS))
examples, labels = map(torch.from_numpy, turns.examples(RANK, OPTIONS["batch"]))
batches = itertools.cycle(zip(examples.split(OPTIONS["batch"]), labels.long().split(OPTIONS["batch"]), strict=True))
ddp, loss_of = made(), nn.CrossEntropyLoss()
if OPTIONS.get("optimizer") != "adam":
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
elif OPTIONS["splits"]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
else:
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)


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
turns.write(FOLDER, RANK, turns.measure(step, distributed.barrier, OPTIONS["rounds"], OPTIONS["steps"]))
distributed.barrier()
os._exit(0)
