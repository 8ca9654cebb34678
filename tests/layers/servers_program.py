"""Trains a table of 600 MB on two servers. The chief prints the most memory of each task, in MB, and by ids of an example the bytes of a step."""

import json
import os
import pathlib

spec = json.loads(os.environ["TF_CONFIG"])["task"]
pathlib.Path(f"{spec['type']}-{spec['index']}.pid").write_text(str(os.getpid()))

import numpy as np  # noqa: E402
import psutil  # noqa: E402

import tfdist  # noqa: E402

trainer = tfdist.Trainer("parameter_server")

import keras  # noqa: E402 (the strategy comes first)

ROWS, COLUMNS, STEPS = 600 * 2**20 // 256, 64, 20


def most_memory(pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


with trainer.scope():
    layer = tfdist.layers.Embedding(ROWS, COLUMNS, combiner="sum")
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
sent = {}
for ids in (64, 128):
    x = np.random.default_rng(0).integers(ROWS, size=(STEPS * 64, ids), dtype=np.int32)
    y = np.ones(STEPS * 64, np.float32)
    model.fit(x[:128], y[:128], batch_size=64, verbose=0)  # compiles
    before = psutil.net_io_counters().bytes_sent
    model.fit(x, y, batch_size=64, verbose=0)
    sent[ids] = (psutil.net_io_counters().bytes_sent - before) // STEPS
memory = {path.stem: most_memory(path.read_text()) for path in pathlib.Path().glob("*.pid")}
print(json.dumps({"memory": memory, "sent": sent}), flush=True)
