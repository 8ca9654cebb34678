"""Saves and loads a table of 300 MB. Argument: a folder. Prints the most memory that each took beyond the table, in MB."""

import pathlib
import sys

import tfdist

trainer = tfdist.Trainer("one_device")

import keras  # noqa: E402 (the strategy comes first)

ROWS, COLUMNS = 1_200_000, 64


def memory(kind):
    (line,) = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def most(do):
    """Returns the most memory that a call took, in MB."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    before = memory("VmRSS")
    do()
    return memory("VmHWM") - before


path = pathlib.Path(sys.argv[1], "model.keras")
with trainer.scope():
    layer = tfdist.layers.Embedding(ROWS, COLUMNS, shards=2, embeddings_initializer="ones")
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
    model.compile(keras.optimizers.SGD(), "mse")
saving = most(lambda: trainer.save(model, path, delete_backup=False))
with trainer.scope():
    loading = most(lambda: keras.models.load_model(path))
print("beyond the table:", round(saving), round(loading - ROWS * COLUMNS * 4 / 2**20))
