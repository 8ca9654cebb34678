"""Runs scripts of `tests.scripts` under a strategy, or plain. Arguments: "plain" or a strategy, output folder, names of scripts."""

import contextlib
import json
import os
import pathlib
import sys
import traceback

from tests import scripts
from tests.multiprocess import harness

name, out, *chosen = sys.argv[1:]
OUT = pathlib.Path(out)
os.environ["SCRIPTS_FOLDER"] = str(OUT / "files")
(OUT / "files").mkdir(parents=True, exist_ok=True)
scope = contextlib.nullcontext
if name != "plain":
    import tfdist

    scope = tfdist.Trainer(name, **({"devices": 2} if name == "mirrored" else {})).scope
task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 0}}'))["task"]

import keras  # noqa: E402 (the strategy comes first)

results = {}
known = scripts.load()
for each in chosen or known:
    keras.utils.set_random_seed(1)
    try:
        results[each] = known[each].run(scope)
    except Exception as e:
        results[each] = f"{type(e).__name__}: {e}"
        traceback.print_exc()
    print(each, flush=True)
    harness.store(out, task["index"] if task["type"] == "worker" else 0, results)
