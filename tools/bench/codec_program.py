"""The program of `tools.bench.codec`. Arguments: output folder, options as JSON."""

import json
import math
import pathlib
import sys
import time

import tensorflow as tf

from tfdist.collectives.communicator import ByteCounter
from tools.bench import compressors, models
from tools.bench.exchange import exchanger

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
tf.get_logger().setLevel("ERROR")  # a function for each compressor is no retracing
shapes = models.SHAPES[OPTIONS["model"]]()
numbers = sum(math.prod(shape) for shape in shapes)
values = [tf.random.normal(shape) for shape in shapes]
runs = {"pass": tf.function(lambda: [value + 1 for value in values], autograph=False)}
runs |= {name: exchanger(ByteCounter(2), compressors.make(name), shapes) for name in OPTIONS["contenders"]}
found = {name: [] for name in runs}
for number in range(OPTIONS["rounds"] + 1):
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        if number:  # the first round compiles
            found[name].append((time.perf_counter() - began) / numbers * 1e9)
(FOLDER / "results.json").write_text(json.dumps({"ns": found}))
