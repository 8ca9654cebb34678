"""The cases of `python_data_program`, and their arithmetic by NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np

RATE = 0.1
START = [np.array([[0.5], [-0.25]], np.float32), np.array([0.1], np.float32)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Items of some sizes, and the form in which they are given.

    Attributes:
        sizes: The number of examples of each item.
        shard: As of `from_pydataset`.
        form: "py_dataset" or "generator".
        workers: Of the PyDataset.
        processes: Whether these are processes.
    """

    sizes: list[int]
    shard: str = "batches"
    form: str = "py_dataset"
    workers: int = 1
    processes: bool = False

    @property
    def name(self) -> str:
        return f"{self.form} {self.sizes} by {self.shard}, workers={self.workers}, {self.processes}"

    def items(self) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(sum(self.sizes))
        return [tuple(rng.standard_normal((size, width)).astype("float32") for width in (2, 1)) for size in self.sizes]

    def trained(self, workers: int) -> dict[str, object]:
        """Returns what a plain loop trains, evaluates and predicts; with whole items a step has one of each worker."""
        items, per_step = self.items(), workers if self.shard == "items" else 1
        weights, bias = (value.astype(np.float64) for value in START)
        losses = []
        steps = -(-len(items) // per_step)
        stream = items * 3  # a generator goes on in the next epoch
        for epoch in range(2):
            squares = count = 0.0
            begin = epoch * steps * per_step if self.form == "generator" else 0
            given = stream[begin : begin + steps * per_step] if self.form == "generator" else items
            for first in range(0, len(given), per_step):
                x, y = (
                    np.concatenate(parts).astype(np.float64)
                    for parts in zip(*given[first : first + per_step], strict=True)
                )
                errors = x @ weights + bias - y
                squares, count = squares + float((errors**2).sum()), count + len(x)
                weights = weights - RATE * 2 * x.T @ errors / len(x)
                bias = bias - RATE * 2 * errors.mean(0)
            losses.append(squares / count)
        x, y = (np.concatenate(parts) for parts in zip(*items, strict=True))
        predicted = x @ weights + bias
        return {
            "weights": [weights, bias],
            "history": {"loss": losses},
            "evaluated": float(((predicted - y) ** 2).mean()),
            "predicted": predicted,
        }


def _drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, rng.integers(1, 8)).tolist()
    return Case(sizes, str(rng.choice(["batches", "items"])), str(rng.choice(["py_dataset", "generator"])))


CASES = [
    Case([8, 8, 3]),
    Case([1]),
    Case([1], "items"),
    Case([8, 8, 8, 1], "items"),
    Case([2, 1], form="generator"),
    Case([5, 1, 7, 2], "items", "generator"),
    Case([4, 4, 4, 4, 3], workers=3),
    Case([4, 4, 4, 4, 3], "items", workers=2, processes=True),
    *map(_drawn, range(6)),
]
