"""Trains a line on PyDatasets and generators, and gives them to `fit` in faulty forms. Arguments: strategy, output folder."""

import contextlib
import logging
import sys

import tfdist
from tests.multiprocess import harness

name, out = sys.argv[1:3]
trainer = tfdist.Trainer(name, **harness.transport())
RANK, WORKERS = trainer.task.index, int(trainer.strategy.num_workers)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tests.multiprocess import python_data_cases as cases  # noqa: E402
from tfdist import data as data_lib  # noqa: E402
from tfdist.runtime import log  # noqa: E402


class Items(keras.utils.PyDataset):
    """The items of a case, and which of them this worker has computed."""

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


def compiled():
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(cases.RATE), "mse")
    model.set_weights(cases.START)
    return model


def trained(case, verbose=0):
    """Returns what is trained, evaluated, and predicted by items in the form of the case."""
    model, items, how = compiled(), case.items(), {"verbose": verbose}
    if case.form == "generator":
        source = (item for _ in range(3) for item in items)
        steps = -(-len(items) // (WORKERS if case.shard == "items" else 1))
        given = source if case.shard == "batches" else data_lib.from_generator(source, case.shard)
        history = trainer.fit(model, given, epochs=2, steps_per_epoch=steps, **how)
        return {"weights": model.get_weights(), "history": history.history}
    data = Items(items, workers=case.workers, use_multiprocessing=case.processes)
    data_lib.from_pydataset(data, case.shard)
    history = trainer.fit(model, data, epochs=2, shuffle=False, **how)
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "computed": sorted({*data.computed}),
        "ended": data.ended,
        "evaluated": trainer.evaluate(model, data, **how),
        "predicted": trainer.predict(model, data, **how),
    }


def fails(data, method="fit", **how):
    """Returns the error with which a method of the trainer ends."""
    try:
        if data is not None:
            getattr(trainer, method)(compiled(), data, verbose=0, **how)
    except (tfdist.DataError, tfdist.ConfigError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


class Missing(Items):
    def __getitem__(self, index):
        if RANK == WORKERS - 1 and index == 2:
            raise FileNotFoundError("no such file: photos/2.png")
        return super().__getitem__(index)


class Drawn(Items):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.default_rng(RANK).standard_normal(x.shape), y


ITEMS = cases.Case([4, 4, 4, 4]).items()


def differing(number):
    for index, (x, y) in enumerate(ITEMS * 60):
        yield x + RANK * (index == number), y


def wide(index):
    return [(np.ones((4, 2 + (i == index and RANK == WORKERS - 1)), "float32"), y) for i, (_, y) in enumerate(ITEMS)]


FAULTS = {
    "an item raises": lambda: fails(Missing(ITEMS), shuffle=False),
    "an item raises in evaluate": lambda: fails(Missing(ITEMS), "evaluate"),
    "an item raises in predict": lambda: fails(Missing(ITEMS), "predict"),
    "a worker's item raises": lambda: fails(data_lib.from_pydataset(Missing(ITEMS, workers=2), "items"), shuffle=False),
    "a worker's process raises": lambda: fails(Missing(ITEMS, workers=1, use_multiprocessing=True), shuffle=False),
    "an item has another shape": lambda: fails(Items(wide(3)), shuffle=False),
    "the length is wrong": lambda: fails(Items(ITEMS, length=6), shuffle=False),
    "the lengths differ": lambda: fails(Items(ITEMS[: 4 - RANK])),
    "noise differs": lambda: fails(Drawn(ITEMS)),
    "a generator differs": lambda: fails(differing(1)),
    "a generator differs later": lambda: fails(differing(200)),
    "a generator ends early": lambda: fails(iter_of(ITEMS[:3] if RANK else ITEMS * 20)),
    "a generator raises": lambda: fails(raising(2 + RANK)),
}


def iter_of(items):
    return (item for item in items)


def raising(number):
    for index, item in enumerate(ITEMS):
        if index == number:
            raise ValueError("the tape is torn")
        yield item


def said_at_first():
    """Returns the first line of the log of a fit on items of each worker."""
    lines = []
    noted = logging.Handler()
    noted.emit = lambda record: lines.append(record.getMessage())
    log.logger.addHandler(noted)
    trained(cases.Case([2, 2], "items"), verbose=2)
    log.logger.removeHandler(noted)
    return next(iter(lines), "")


results = {"said": said_at_first(), "trained": {}}
for case in cases.CASES:
    print(case.name, flush=True)
    results["trained"][case.name] = trained(case)
if WORKERS > 1:
    results["faults"] = {}
    for fault, check in FAULTS.items():
        print(fault, flush=True)
        results["faults"][fault] = check()
with contextlib.suppress(tfdist.ConfigError):
    data_lib.from_pydataset(Items(ITEMS), "rows")
    raise AssertionError("an unknown shard")
harness.store(out, RANK, results)
