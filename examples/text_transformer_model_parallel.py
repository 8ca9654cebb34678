"""A transformer of which each worker holds and computes a part, by a layout map, as in Megatron-LM.

    python examples/text_transformer_model_parallel.py                                # one process, the whole model
    tfdist launch --workers=2 -- python examples/text_transformer_model_parallel.py   # two processes, half of each block

The text is synthetic: each word follows from the two words before it. Takes about 1 minute on 2 cores; expect an accuracy above 0.8.
"""

import argparse
import pathlib

import keras
import numpy as np
from keras import layers

import tfdist

WORDS = 32
LENGTH = 16
WIDTH = 64


def transformer(heads: int, blocks: int) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    x = layers.Conv1D(WIDTH, 2, padding="causal")(x)  # the order of words
    for number in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, WIDTH // heads, name=f"attention_{number}")(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"wide_{number}")(y)
        x = x + layers.Dense(WIDTH, name=f"narrow_{number}")(y)
    return keras.Model(inputs, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def layout_map(mesh: keras.distribution.DeviceMesh) -> keras.distribution.LayoutMap:
    """Returns the layouts of Megatron-LM: by columns before an activation and by heads, and by rows after it."""
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["words.*embeddings"] = ("model", None)
    layouts["attention.*(query|key|value).*kernel"] = (None, "model", None)
    layouts["attention.*(query|key|value).*bias"] = ("model", None)
    layouts[".*attention_output.*kernel"] = ("model", None, None)
    layouts["wide.*kernel"] = (None, "model")
    layouts["wide.*bias"] = ("model",)
    layouts["narrow.*kernel"] = ("model", None)
    return layouts


def sentences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns sentences, and the next word at each place."""
    words = np.random.default_rng(1).integers(0, WORDS, (count, LENGTH + 1))
    for place in range(2, LENGTH + 1):
        words[:, place] = (words[:, place - 1] + words[:, place - 2]) % WORDS
    return words[:, :-1], words[:, 1:]


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--sentences", type=int, default=4096)
args = parser.parse_args()

found = tfdist.find_cluster()
workers = len(found[0].training_tasks()) if found else 1
if workers > 1:
    devices = [f"worker:{number}" for number in range(workers)]
    mesh = keras.distribution.DeviceMesh((1, workers), ("batch", "model"), devices)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map(mesh), batch_dim_name="batch")
    trainer = tfdist.Trainer("multi_worker_mirrored", distribution=distribution)
else:
    trainer = tfdist.Trainer("one_device")
keras.utils.set_random_seed(1)

with trainer.scope():
    model = transformer(heads=4, blocks=2)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )

x, y = sentences(args.sentences)
model.fit(x, y, batch_size=32, epochs=args.epochs, verbose=2)
results = model.evaluate(x, y, batch_size=128, return_dict=True, verbose=0)
pathlib.Path("runs").mkdir(exist_ok=True)
trainer.save(model, "runs/text_transformer_model_parallel.keras")
if trainer.is_chief:
    print(f"accuracy {results['accuracy']:.4f}, on {workers} workers")
