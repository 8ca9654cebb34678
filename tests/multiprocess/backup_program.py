"""A training that is backed up, and dies where it is told to. Arguments: strategy, output folder, options as JSON.

Options: `save_freq`; `kills`, for each life a list [rank, moment, number]: the process of that rank kills itself at the
number-th time of that moment in that life, which is "step" (its end), "test" (a step of validation), "part" (about to write
its part), "torn" (half of its part is written), "upload" (about to upload a file), "written" (its part is written) or "manifest"
(about to write it; the chief alone). Instead of a rank it may name a task, which the chief then kills. `data` of `DATA`;
`signal` in place of SIGKILL, after which the chief's steps are slow if another task got it; `suspended`: for how many seconds the chief is then suspended;
`sync_every`; `teacher`: whether the model has one; `bucket_bytes` of each life; `folder` of the backups in place of `backup` in the output folder, in which `{rank}` stands for the rank.
"""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness
from tfdist.backup.storage import Storage
from tfdist.compression import PerVariable, create
from tfdist.config import CompressionConfig
from tfdist.runtime.folders import storage
from tfdist.runtime.report import progress

name, out, options = (
    sys.argv[1],
    sys.argv[2],
    {"save_freq": 7, "epochs": 3, "data": "function", **json.loads(sys.argv[3])},
)
if "TF_CONFIG" in os.environ:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    pathlib.Path(out, f"pid-{task['type']}:{task['index']}").write_text(str(os.getpid()))
rules = {pattern: create(CompressionConfig(**how)) for pattern, how in options.get("compression", {}).items()}
compression = PerVariable(rules) if rules else None
devices = {"devices": 2} if name in ("mirrored", "central_storage") else harness.transport()
if options.get("sync_every"):
    devices |= {"sync_every": options["sync_every"], "outer": tfdist.Outer(learning_rate=0.7, momentum=0.9)}
trainer = tfdist.Trainer(name, compression=compression, **devices)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import data as data_lib  # noqa: E402
from tfdist.gradients.optimizer import get_reduction  # noqa: E402
from tfdist.tasks import digits  # noqa: E402

RANK, LIFE = trainer.task.index, progress.restarts()
if "bucket_bytes" in options:
    set_options(trainer.strategy, bucket_bytes=options["bucket_bytes"][LIFE])
BATCH, EXAMPLES = 32, 320

keras.utils.set_random_seed(options.get("seed", 3))
tf.config.experimental.enable_op_determinism()


class Deaths:
    """Ends this process at the number-th time of a moment."""

    def __init__(self):
        plan = options.get("kills", [])
        self.who, self.moment, self.left = plan[LIFE] if len(plan) > LIFE else (None, None, 0)

        self.pause = 0.0
        self.mine = self.who == RANK or (isinstance(self.who, str) and RANK == 0)

    def at(self, moment):
        if self.mine and moment == self.moment:
            time.sleep(self.pause)
            self.left -= 1
            if self.left == 0:
                pid = (
                    int(pathlib.Path(out, f"pid-{self.who}").read_text()) if isinstance(self.who, str) else os.getpid()
                )
                if options.get("suspended"):
                    wake = f"sleep {options['suspended']}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", wake])
                    os.kill(pid, signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    os.kill(pid, options.get("signal", signal.SIGKILL))
                if "signal" in options:  # the chief trains on until the task's message arrives; it must not end before
                    self.pause = 0.0 if pid == os.getpid() else 0.1
                    return
                ends = time.monotonic() + 60  # for the launcher to notice it, or the training might end before
                while pid != os.getpid() and progress.restarts() == LIFE and time.monotonic() < ends:
                    time.sleep(0.05)


deaths = Deaths()
write_part, write_manifest, upload = Storage.write_part, Storage.write_manifest, storage.upload


def deadly_part(self, point, part, tensors, *more):
    deaths.at("part")
    if deaths.moment == "torn" and deaths.mine and deaths.left == 1:
        write_part(self, point, part, dict(list(tensors.items())[: len(tensors) // 2]))
        pathlib.Path(self.path(point, f"{part}.index")).unlink()
    deaths.at("torn")
    write_part(self, point, part, tensors, *more)
    deaths.at("written")


def deadly_manifest(*arguments):
    deaths.at("manifest")
    write_manifest(*arguments)


def deadly_upload(*arguments):
    deaths.at("upload")
    upload(*arguments)


Storage.write_part, Storage.write_manifest = deadly_part, deadly_manifest
storage.upload = deadly_upload


class Watch(keras.callbacks.Callback):
    """Notes the steps of this life, and dies."""

    def __init__(self):
        super().__init__()
        self.file = pathlib.Path(out, f"steps-{RANK}").open("a")  # noqa: SIM115 (until the end)
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.file.write(f"{LIFE} {self.epoch} {batch}\n")
        self.file.flush()
        deaths.at("step")

    def on_test_batch_end(self, batch, logs=None):
        deaths.at("test")


def build():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )


class MeanTeacher(keras.Model):
    """A model and its teacher, whose weights each step moves towards the model's."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = build(), build()

    def call(self, x, training=None):
        return self.student(x, training=training)

    def train_step(self, data):
        logs = super().train_step(data)
        for e, w in zip(self.teacher.weights, self.student.weights, strict=True):
            e.assign(0.8 * e + 0.2 * w)
        return logs


(x, y), validation = digits.load()
x, y, validation = x[:EXAMPLES], y[:EXAMPLES], (validation[0][:64], validation[1][:64])
plain = tf.data.Dataset.from_tensor_slices((x, y))
STEPS = EXAMPLES // BATCH


def mine():
    """Which examples are this worker's own; the workers have unequal numbers."""
    return slice(0, 200) if RANK == 0 else slice(200, EXAMPLES)


def own_dataset():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((x[mine()], y[mine()])).shuffle(100).batch(BATCH).with_options(options)


class Noisy(keras.utils.PyDataset):
    """Draws an order at the end of each epoch, and noise for each item: with whole items each worker draws its own."""

    def __init__(self, shard="batches", **how):
        super().__init__(**how)
        self.shard = shard
        self.size = BATCH // 2 if shard == "items" else BATCH
        self.noise, self.orders = np.random.default_rng(RANK if shard == "items" else 0), np.random.default_rng(1)
        self.order = np.arange(EXAMPLES)

    def __len__(self):
        return EXAMPLES // self.size

    def __getitem__(self, index):
        rows = self.order[index * self.size : (index + 1) * self.size]
        return x[rows] + 0.1 * self.noise.standard_normal(x[rows].shape).astype("float32"), y[rows]

    def on_epoch_end(self):
        self.orders.shuffle(self.order)


class Plain(Noisy):
    """As `Noisy`, without noise, which `workers` would draw in any order."""

    def __getitem__(self, index):
        rows = self.order[index * self.size : (index + 1) * self.size]
        return x[rows], y[rows]


DATA = {
    "py_dataset": lambda: {"x": Noisy()},
    "py_dataset_by_items": lambda: {"x": Noisy(shard="items")},
    "py_dataset_with_workers": lambda: {"x": Plain(shard="items", workers=2)},
    "function": lambda: {"x": lambda c: data_lib.epochs((x, y), c, BATCH, 5), "steps_per_epoch": STEPS},
    "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
    "dataset": lambda: {"x": plain.shuffle(100).batch(BATCH)},
    "unknown": lambda: {"x": plain.shuffle(100).filter(lambda *_: True).batch(BATCH)},
    "endless": lambda: {"x": plain.shuffle(100).repeat().batch(BATCH), "steps_per_epoch": STEPS - 1},
    "interleave": lambda: {
        "x": (
            tf.data.Dataset.range(STEPS)
            .shuffle(STEPS)
            .interleave(lambda n: plain.skip(n * BATCH).take(BATCH).shuffle(BATCH), cycle_length=2)
            .shuffle(100)
            .batch(BATCH)
        )
    },
    "repeated": lambda: {"x": plain.shuffle(100).batch(BATCH), "steps_per_epoch": STEPS // 2},
    "finite_function": lambda: {
        "x": lambda c: (
            plain.shard(c.num_input_pipelines, c.input_pipeline_id).shuffle(50).batch(BATCH // c.num_replicas_in_sync)
        )
    },
    "off": lambda: {"x": own_dataset()},
    "own_rows": lambda: {"x": data_lib.own_rows(x[mine()], y[mine()]), "batch_size": BATCH},
    "generator": lambda: {
        "x": itertools.cycle([(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, EXAMPLES, BATCH)]),
        "steps_per_epoch": STEPS,
    },
}

with trainer.scope():
    model = MeanTeacher() if options.get("teacher") else build()
    optimizer = keras.optimizers.Adam(3e-3, **options.get("optimizer", {}))
    if options.get("loss_scale"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=4)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=options.get("steps_per_execution", 1),
    )

given = DATA[options["data"]]()
if options["data"] == "generator":
    source = given["x"]
    given["x"] = (batch for batch in source)
stopping = keras.callbacks.EarlyStopping(
    "loss", min_delta=0.2, patience=options.get("patience", 50), restore_best_weights=True
)
plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3)
decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
callbacks = [stopping, plateau, decay, Watch()]
if options["save_freq"]:
    callbacks.append(
        tfdist.BackupAndRestore(
            options.get("folder", os.path.join(out, "backup")).replace("{rank}", str(RANK)),
            options["save_freq"],
            **options.get("backup", {}),
        )
    )
if options.get("warm"):  # a fit before it, without backups
    trainer.fit(model, **DATA["function"](), epochs=1, validation_data=validation, verbose=0)
history = trainer.fit(
    model, **given, epochs=options["epochs"], validation_data=validation, verbose=0, callbacks=callbacks
)
strategy = trainer.strategy
local = strategy.experimental_local_results
variables = [*model.variables, *model.optimizer.variables]
reduction = get_reduction(model.optimizer)
errors = [state for states in reduction.states for state in states] if reduction else []
results = {
    "history": history.history,
    "epochs": history.epoch,
    "variables": {v.path: [c.numpy() for c in local(v.value)] for v in variables},
    "errors": [[c.numpy() for c in local(v)] for v in errors],
    "stopping": {k: getattr(stopping, k) for k in ("wait", "best", "best_epoch", "stopped_epoch", "best_weights")},
    "plateau": {k: getattr(plateau, k) for k in ("wait", "best", "cooldown_counter")},
    "restarts": progress.restarts(),
    "saved": sorted(str(p.relative_to(out)) for p in pathlib.Path(out, "backup").rglob("*") if p.is_file()),
}
if options.get("save_model"):
    trainer.save(model, os.path.join(out, "model.keras"))
harness.store(out, RANK, results)
