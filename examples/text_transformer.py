"""A small transformer that predicts the next byte of English prose, compared with a 3-gram model of the same text.

    python examples/text_transformer.py                                # one process
    tfdist launch --workers=2 -- python examples/text_transformer.py   # two processes
    tfdist launch --workers=2 --ps=1 -- python examples/text_transformer.py --strategy=parameter_server

The text is the docstrings of Python's standard library; every tenth docstring is held out. Takes about 2 minutes on 2 cores;
expect a perplexity of the transformer below 6 on held-out docstrings. The 3-gram model has a perplexity of about 7.3.
"""

import argparse
import ast
import pathlib
import sysconfig
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tfdist

LENGTH = 128  # bytes of context
VOCABULARY = 128  # ASCII


def docstrings_of(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yields the docstrings of a module, class or function, and of the classes and functions in it."""
    yield ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from docstrings_of(child)


def read_docstrings() -> list[str]:
    """Returns the docstrings of the standard library, each once, in the order of its files."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = {}  # a dictionary keeps the order
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if path.parent.name not in ("test", "idlelib", "lib2to3", "site-packages"):
            texts.update(dict.fromkeys(docstrings_of(ast.parse(path.read_bytes()))))
    return [text for text in texts if text.isascii() and len(text) > 40]


def encode(texts: list[str]) -> np.ndarray:
    return np.frombuffer("\n\n".join(texts).encode("ascii"), np.uint8).astype(np.int32)


def trigram_perplexity(train: np.ndarray, heldout: np.ndarray) -> float:
    """Returns the perplexity of a 3-gram model, smoothed by 2-grams and 1-grams (Witten and Bell, 1991)."""

    def grams(text, order):  # encodes the last `order` bytes at each position, from the third on, as one number
        return sum(text[2 - i : len(text) - i].astype(np.int64) * VOCABULARY**i for i in range(order))

    probability = 1 / VOCABULARY
    for order in (1, 2, 3):
        counts = np.bincount(grams(train, order), minlength=VOCABULARY**order).reshape(-1, VOCABULARY)
        before, byte = np.divmod(grams(heldout, order), VOCABULARY)
        count, kinds = counts.sum(axis=1)[before], (counts > 0).sum(axis=1)[before]
        mixed = (counts[before, byte] + kinds * probability) / np.maximum(count + kinds, 1)
        probability = np.where(count > 0, mixed, probability)
    return float(np.exp(-np.log(probability).mean()))


def windows(text: np.ndarray) -> tf.data.Dataset:
    """Returns pairs of LENGTH bytes and the next byte after each of them."""
    rows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[::LENGTH]
    return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))


@keras.saving.register_keras_serializable("examples")
class AddPositions(keras.layers.Layer):
    """A layer that adds a learned vector for each position."""

    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.02))

    def call(self, x):
        return x + self.positions


def transformer(width: int, heads: int, blocks: int) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = AddPositions()(keras.layers.Embedding(VOCABULARY, width)(inputs))
    x = keras.layers.Conv1D(width, 4, padding="causal")(
        x
    )  # the last bytes' local context, which attention learns slowly
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(y))
    return keras.Model(inputs, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)), name="transformer")


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="multi_worker_mirrored")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--steps", type=int, default=-1, help="steps per epoch; default: all of the text")
args = parser.parse_args()

trainer = tfdist.Trainer(args.strategy)  # before any tensor
keras.utils.set_random_seed(1)
docstrings = read_docstrings()
heldout = encode(docstrings[::10])
text = encode([docstring for index, docstring in enumerate(docstrings) if index % 10])
train = (
    windows(text).shuffle(100_000, seed=1).batch(16, drop_remainder=True).take(args.steps).prefetch(tf.data.AUTOTUNE)
)
validation = windows(heldout).batch(32).take(args.steps).prefetch(tf.data.AUTOTUNE)

with trainer.scope():
    model = transformer(width=128, heads=4, blocks=3)
    steps = args.epochs * len(train)
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=3e-3, warmup_steps=steps // 10)
    model.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

pathlib.Path("runs").mkdir(exist_ok=True)
callbacks = [keras.callbacks.TerminateOnNaN(), keras.callbacks.CSVLogger("runs/text_transformer.csv")]
model.fit(train, validation_data=validation, epochs=args.epochs, callbacks=callbacks, verbose=2)
results = model.evaluate(validation, return_dict=True, verbose=0)
trainer.save(model, "runs/text_transformer.keras")
if trainer.is_chief:
    print(f"{len(text)} bytes to train on, {len(heldout)} held out, {trainer.num_replicas} replicas")
    print(f"perplexity of the 3-gram model {trigram_perplexity(text, heldout):.3f}")
    print(f"perplexity of the transformer {np.exp(results['loss']):.3f}")
