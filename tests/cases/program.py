"""Runs cases with one arm. Arguments: the arm, a folder for the results, and cases as `source.name`.

Each rank adds a line to its file of results after each case: so those before a crash are known.
"""

import json
import os
import pathlib
import re
import sys
import time
from typing import Any

from tests.cases.arms import ARMS

arm, out, chosen = ARMS[sys.argv[1]], pathlib.Path(sys.argv[2]), sys.argv[3:]
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0
if arm.threads:  # TensorFlow reads it when it starts
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(arm.threads[rank])
if arm.on_gpus:
    os.environ["TFDIST_CPUS_AS_GPUS"] = "1"

import keras  # noqa: E402

import tfdist  # noqa: E402

options: dict[str, Any] = {"devices": arm.devices} if arm.devices > 1 else {}
if arm.transport:
    options["transport"] = arm.transport
if arm.pieces:
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["worker:0", "worker:1"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*/kernel"] = (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)
strategy = tfdist.Trainer(arm.strategy, **options).strategy
keras.distribution.set_distribution(None)  # the Trainers of the cases take the strategy

from tests.cases import case as case_lib  # noqa: E402 (the strategy comes first)

out.mkdir(parents=True, exist_ok=True)
for each in chosen:
    begin = time.process_time()
    print(each, flush=True)
    source, _, name = each.partition(".")
    world = case_lib.World(tfdist.Trainer(strategy), arm, out / re.sub(r"\W+", "-", each))
    result = case_lib.evaluate(case_lib.find(source, name), world)
    seconds = round(time.process_time() - begin, 2)
    with (out / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"case": each, "processor seconds": seconds, **result}) + "\n")
