"""One task of data-parallel JAX, collectives by gloo, without TensorFlow. Arguments: output folder, options as JSON.

Rank and size are what TF_CONFIG says. `options`: `rounds`, `steps` of a round, `batch`. A process has one device. Gradients travel
as float32: for sums on CPUs XLA turns numbers of 16 bits into float32 before it sends them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import pathlib
import socket
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tools.bench import models, turns

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
WORKERS, RANK = turns.cluster()
BATCH, RATE = OPTIONS["batch"], 0.01
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


def named_by_address() -> None:
    """Gives this process a host name that leads to its host of the laboratory, as real hosts have: JAX's gloo listens there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME):
        raise OSError(ctypes.get_errno(), "this process cannot have a host name of its own")
    socket.sethostname(WORKERS[RANK].rpartition(":")[0])


def initial() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the weights that all workers begin with."""
    rng = np.random.default_rng(0)
    layers = []
    for shape in itertools.pairwise(models.MLP):
        limit = (6 / sum(shape)) ** 0.5
        layers.append((rng.uniform(-limit, limit, shape).astype(np.float32), np.zeros(shape[1:], np.float32)))
    return layers


def loss_of(weights: Any, data: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of this worker's batch."""
    for kernel, bias in weights[:-1]:
        data = jax.nn.relu(data @ kernel + bias)
    scores = jax.nn.log_softmax(data @ weights[-1][0] + weights[-1][1])
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


if turns.in_laboratory():
    named_by_address()
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(WORKERS[0], num_processes=len(WORKERS), process_id=RANK)
mesh = jax.make_mesh((len(WORKERS),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere, split = PartitionSpec(), PartitionSpec("workers")


@functools.partial(jax.jit, donate_argnums=0)
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(everywhere, split, split), out_specs=(everywhere, split), check_vma=False
)
def train_step(weights: Any, data: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """Returns the new weights, and this worker's loss."""
    loss, grads = jax.value_and_grad(loss_of)(weights, data, labels)
    grads = jax.lax.pmean(grads, "workers")
    return jax.tree.map(lambda weight, grad: weight - RATE * grad, weights, grads), loss[None]


@functools.partial(jax.jit, out_shardings=NamedSharding(mesh, everywhere))
def total(numbers: jax.Array) -> jax.Array:
    """Returns the sum of the workers' numbers."""
    return numbers.sum()


def shared(part: np.ndarray) -> jax.Array:
    """Returns an array of which each worker has a part."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, split), part)


examples, labels = turns.examples(RANK, BATCH)
weights = jax.device_put(initial(), NamedSharding(mesh, everywhere))
numbers = itertools.cycle(range(0, len(examples), BATCH))
one = shared(np.ones(1, np.float32))


def step() -> float:
    """Trains on a batch; returns the loss."""
    global weights
    begin = next(numbers)
    batch = slice(begin, begin + BATCH)
    weights, loss = train_step(weights, shared(examples[batch]), shared(labels[batch]))
    jax.block_until_ready(weights)
    return float(loss.addressable_data(0)[0])


def meet() -> float:
    """Returns when all workers are here."""
    return float(total(one))


turns.write(FOLDER, RANK, turns.measure(step, meet, OPTIONS["rounds"], OPTIONS["steps"]))
meet()
jax.distributed.shutdown()  # a barrier
