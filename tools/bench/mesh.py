"""A step of a transformer that a mesh of workers computes, beside one process and data parallel training of the same global batch.

Two blocks, 64 words of a vocabulary of 1,024, 32 sentences in a global batch, Adam; each contender runs alone. `1 x 2` computes parts of
layers and of the loss, as in Megatron-LM; `2 x 2` does so in two groups with half of the batch each. `2 x 1` and `4 x 1` are data parallel.
Workers share the cores evenly, and exchange through shared memory. `activations, MB`: what a worker sums with its group in a step.
`formula, MB`: the same by Megatron's formula, batch x length x width four times for each block, once for the embedding and once for the logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench import frame
from tools.bench.record import Record

BATCH, LENGTH, BLOCKS = 32, 64, 2
CASES = [{"width": width} for width in (128, 512)]
# By name: data groups and workers of each; 0 groups are one process.
CONTENDERS = {"one process": (0, 1), "2 x 1": (2, 1), "1 x 2": (1, 2), "4 x 1": (4, 1), "2 x 2": (2, 2)}
AGAINST = {"2 x 1": "one process", "1 x 2": "2 x 1", "4 x 1": "one process", "2 x 2": "4 x 1"}


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the median ms of a step for each contender."""
    chosen = [name for name in names or CONTENDERS if name in CONTENDERS]
    samples: dict[str, list[float]] = {name: [] for name in chosen}
    columns: dict[str, dict[str, float]] = {"activations, MB": {}, "formula, MB": {}, "weights and slots, MB": {}}
    for _ in range(rounds):
        for name in chosen:
            groups, members = CONTENDERS[name]
            options = {**case, "groups": groups, "members": members, "batch": BATCH, "length": LENGTH, "blocks": BLOCKS}
            found = frame.run("tools.bench.mesh_program", options, max(1, groups) * members, pinned=True)["tasks"][0]
            samples[name].append(statistics.median(found["seconds"]) * 1000)
            columns["weights and slots, MB"][name] = found["held"] / 1e6
            if members > 1:
                columns["activations, MB"][name] = found["summed"] / 1e6
                columns["formula, MB"][name] = (4 * BLOCKS + 2) * BATCH / groups * LENGTH * case["width"] * 4 / 1e6
    against = {name: other for name, other in AGAINST.items() if name in chosen and other in chosen}
    return Record("mesh", dict(case), "ms", samples, against, columns)
