"""How long a sum among workers takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.ranks import Ranks
from tfdist.collectives.requests import AllReduce

BYTES = 4_000_000  # of a bucket, unless the user has said otherwise
_TIMES = 4  # the first one connects


def measure(communicator: Communicator, ranks: Ranks) -> float:
    """Returns the seconds that the sum of `BYTES` takes, the least of some, on the rank that waits longest. A collective.

    Args:
        communicator: What computes the sum.
        ranks: The workers, one replica each.
    """
    numbers = tf.zeros([BYTES // 4])

    def exchange() -> Generator[Any, Any, tf.Tensor]:
        (total,) = yield AllReduce([numbers])
        return total[0]

    total = tf.function(lambda: communicator.run([exchange()])[0], autograph=False).get_concrete_function()
    seconds = []
    for _ in range(_TIMES):
        ranks.barrier()
        began = time.perf_counter()
        total().numpy()
        seconds.append(time.perf_counter() - began)
    return float(ranks.gather(min(seconds[1:])).max())
