"""One task of `tools.bench.compression`. Arguments: output folder, models, compressors, rounds."""

import json
import os
import pathlib
import sys
import time

import tfdist

out, models, names, rounds = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(","), int(sys.argv[4])
trainer = tfdist.Trainer("multi_worker_mirrored")

import tensorflow as tf  # noqa: E402 (the strategy comes first)

from tfdist.compression.base import Layout  # noqa: E402
from tfdist.compression.comm import group_of  # noqa: E402
from tools.bench.compression import COMPRESSORS, SHAPES, exchanger  # noqa: E402

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[trainer.task.index % len(cores)]})
found = {}
for model in models:
    shapes = SHAPES[model]()
    group = group_of(trainer.strategy)
    run = {name: exchanger(group, Layout(COMPRESSORS[name](), [("", shape) for shape in shapes])) for name in names}
    found[model] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:  # in turn, so that what disturbs disturbs all
            began = time.perf_counter()
            run[name](tf.constant(number, tf.int64))
            if number:  # the first round compiles
                found[model][name].append(time.perf_counter() - began)
if trainer.is_chief:
    pathlib.Path(out, "results.json").write_text(json.dumps(found))
