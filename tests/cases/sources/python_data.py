"""PyDatasets and generators train what a plain loop trains; a fault on one worker is the same error on all."""

from __future__ import annotations

import dataclasses
import logging
import re

import keras
import numpy as np

from tests.cases.arms import MIRRORED, THREE_WORKERS, WORKERS
from tests.cases.case import case
from tfdist import data as data_lib

RATE = 0.1
START = [np.array([[0.5], [-0.25]], np.float32), np.array([0.1], np.float32)]


@dataclasses.dataclass(frozen=True)
class Form:
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
        sizes = "+".join(map(str, self.sizes))
        kind = "processes" if self.processes else "threads"
        return f"{self.form} of {sizes} by {self.shard} in {self.workers} {kind}"

    def items(self) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(sum(self.sizes))
        return [tuple(rng.standard_normal((size, width)).astype("float32") for width in (2, 1)) for size in self.sizes]

    def right(self, workers: int) -> dict[str, object]:
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


class Items(keras.utils.PyDataset):
    """Items, and which of them this worker has computed."""

    def __init__(self, items, length=None, **how):
        super().__init__(**how)
        self.items, self.length, self.computed, self.ended = items, length or len(items), [], 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.computed.append(index)
        return self.items[index]

    def on_epoch_end(self):
        self.ended += 1


def compiled(world):
    with world.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.set_weights(START)
    return model


def trained(world, form):
    """Compares what is trained on items in some form with the loop."""
    model, items, right = compiled(world), form.items(), form.right(world.workers)
    if form.form == "generator":
        source = (item for _ in range(3) for item in items)
        steps = -(-len(items) // (world.workers if form.shard == "items" else 1))
        given = source if form.shard == "batches" else data_lib.from_generator(source, form.shard)
        found = {"history": model.fit(given, epochs=2, steps_per_epoch=steps, verbose=0).history}
        found["weights"] = model.get_weights()
        return {key: (found[key], right[key]) for key in found}
    data = Items(items, workers=form.workers, use_multiprocessing=form.processes)
    data_lib.from_pydataset(data, form.shard)
    found = {"history": model.fit(data, epochs=2, shuffle=False, verbose=0).history}
    ended = data.ended
    found |= {"weights": model.get_weights(), "evaluated": model.evaluate(data, verbose=0)}
    found["predicted"] = model.predict(data, verbose=0)
    pairs = {key: (found[key], right[key]) for key in found}
    pairs["ended"] = (ended, 3)  # before the first epoch, as Keras does, and after each
    if not form.processes:
        every = range(len(items))
        own = {*(every[world.rank :: world.workers] if form.shard == "items" else every)}
        # The first two tell the form of the data.
        pairs["computed"] = (own <= {*data.computed} <= own | {0, 1}, True)
    return pairs


def drawn(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, rng.integers(1, 8)).tolist()
    return Form(sizes, str(rng.choice(["batches", "items"])), str(rng.choice(["py_dataset", "generator"])))


FORMS = [
    Form([8, 8, 8, 1], "items"),
    Form([2, 1], form="generator"),
    Form([5, 1, 7, 2], "items", "generator"),
    Form([4, 4, 4, 4, 3], workers=3),
    Form([4, 4, 4, 4, 3], "items", workers=2, processes=True),
]
FURTHER = [Form([8, 8, 3]), Form([1]), Form([1], "items"), *map(drawn, range(6))]
for form in FORMS:

    @case(MIRRORED, WORKERS, THREE_WORKERS, full=(MIRRORED, THREE_WORKERS), name=form.name)
    def _(world, form=form):
        return trained(world, form)


for form in FURTHER:

    @case(MIRRORED, WORKERS, THREE_WORKERS, full=True, name=form.name)
    def _(world, form=form):
        return trained(world, form)


@case(WORKERS)
def the_first_line_says_that_each_worker_has_items_of_its_own(world):
    lines = []
    noted = logging.Handler()
    noted.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tfdist")
    logger.addHandler(noted)
    compiled(world).fit(data_lib.from_pydataset(Items(Form([2, 2]).items()), "items"), verbose=2)
    logger.removeHandler(noted)
    sentence = (
        "multi_worker_mirrored: 2 replicas; a step trains on 2 items of the data, one from each worker (shard='items')"
    )
    return {"line": (lines[:1], [sentence] if world.rank == 0 else lines[:1])}


@case(WORKERS, error="ConfigError: .*rows")
def an_unknown_shard(world):
    data_lib.from_pydataset(Items(ITEMS), "rows")


# What is wrong: a function of the world -> the data of this rank; the method; and the error on every rank.

ITEMS = Form([4, 4, 4, 4]).items()


class Missing(Items):
    """The last worker lacks an item."""

    def __init__(self, world, **how):
        super().__init__(ITEMS, **how)
        self.lacks = 2 if world.rank == world.workers - 1 else None

    def __getitem__(self, index):
        if index == self.lacks:
            raise FileNotFoundError("no such file: photos/2.png")
        return super().__getitem__(index)


class Drawn(Items):
    def __init__(self, world):
        super().__init__(ITEMS)
        self.seed = world.rank

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.default_rng(self.seed).standard_normal(x.shape), y


def differing(world, number):
    for index, (x, y) in enumerate(ITEMS * 60):
        yield x + world.rank * (index == number), y


def wide(world, index):
    ranks_width = 2 + world.rank
    return [(np.ones((4, ranks_width if i == index else 2), "float32"), y) for i, (_, y) in enumerate(ITEMS)]


def raising(number):
    for index, item in enumerate(ITEMS):
        if index == number:
            raise ValueError("the tape is torn")
        yield item


ITEM = "DataError: The data of worker:1 cannot be read: "
MISSING = f"{ITEM}item 2 of Missing: FileNotFoundError: no such file: photos/2.png"
ALIKE = "must be the same on all tasks. Received:"
FAULTS = {
    "an item raises": (Missing, "fit", MISSING),
    "an item raises in evaluate": (Missing, "evaluate", MISSING),
    "an item raises in predict": (Missing, "predict", MISSING),
    "a worker's process raises": (lambda world: Missing(world, workers=1, use_multiprocessing=True), "fit", MISSING),
    "an item has another shape": (
        lambda world: Items(wide(world, 3)),
        "fit",
        f"{ITEM}batch 3: an array has the shape (4, 3), and those of the first batches (None, 2)",
    ),
    "the length is wrong": (
        lambda world: Items(ITEMS, length=6),
        "fit",
        "DataError: The data of worker:0 cannot be read: item 4 of Items: IndexError: list index out of range",
    ),
    "the lengths differ": (
        lambda world: Items(ITEMS[: 4 - world.rank]),
        "fit",
        f"ConfigError: The length and shard of the Items {ALIKE} length 4 and shard='batches' on worker:0, "
        "length 3 and shard='batches' on worker:1.",
    ),
    "noise differs": (Drawn, "fit", f"DataError: Batch 0 of the PyDataset Drawn {ALIKE} checksum"),
    "a generator differs": (
        lambda world: differing(world, 1),
        "fit",
        f"DataError: Batch 1 of the generator {ALIKE} checksum",
    ),
    "a generator differs later": (
        lambda world: differing(world, 200),
        "fit",
        f"DataError: Batch 200 of the generator {ALIKE} checksum",
    ),
    "a generator ends early": (
        lambda world: (item for item in (ITEMS[:3] if world.rank else ITEMS * 20)),
        "fit",
        f"DataError: The end of the generator {ALIKE} none yet on worker:0, after 3 batches on worker:1.",
    ),
    "a generator raises": (
        lambda world: raising(2 + world.rank),
        "fit",
        "DataError: The data of worker:0 cannot be read: batch 2: ValueError: the tape is torn",
    ),
}
for name, (data_of, method, sentence) in FAULTS.items():

    @case(WORKERS, error=f"^{re.escape(sentence)}", name=name)
    def _(world, data_of=data_of, method=method):
        data = data_of(world)
        in_order = {"shuffle": False} if method == "fit" and isinstance(data, Items) else {}
        getattr(compiled(world), method)(data, verbose=0, **in_order)


@case(WORKERS)
def an_item_that_only_another_worker_reads_may_raise(world):
    data = data_lib.from_pydataset(Missing(world, workers=2), "items")  # the second worker lacks the first one's
    model = compiled(world)
    model.fit(data, shuffle=False, verbose=0)
    return {"finite": (np.isfinite(model.get_weights()[0]).all(), True)}
