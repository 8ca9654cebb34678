"""What compressors do between real processes. Arguments: strategy, output folder, names of parts (see the end)."""

import itertools
import os
import re
import sys

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness

strategy_name, out, *parts = sys.argv[1:]
trainer = tfdist.Trainer(strategy_name, **({"devices": 2} if strategy_name == "mirrored" else harness.transport()))

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.compression import test_compressors  # noqa: E402
from tfdist.collectives.communicator import communicator_for  # noqa: E402
from tfdist.compression.base import BucketedReduction  # noqa: E402
from tfdist.gradients.optimizer import get_reduction  # noqa: E402
from tfdist.gradients.reduction import Reduction, bucketed_all_reduce  # noqa: E402
from tfdist.monitoring import compression_report, network  # noqa: E402
from tfdist.tasks import digits, synthetic  # noqa: E402

RANK, SIZE = trainer.task.index, trainer.num_replicas
STEPS = 300
tf.config.experimental.enable_op_determinism()
local = trainer.strategy.experimental_local_results
default_bucket_bytes = getattr(trainer.strategy, "bucket_bytes", 0)
set_options(trainer.strategy, bucket_bytes=4000)  # several of each model below
(x, y), validation = digits.load()
x, y = x[:1280], y[:1280]


def exchanges(compressor):
    """Returns the totals and states of some steps, of this process's ranks."""
    group = communicator_for(trainer.strategy)
    layout = BucketedReduction(
        compressor, [(str(number), shape) for number, shape in enumerate(test_compressors.SHAPES)]
    )
    states = [tuple(s.initial(s.shape, number) for s in slots) for number, slots in enumerate(layout.slots)]
    states = [states for _ in group.ranks]
    found = []

    @tf.function(autograph=False)
    def exchange(values, states, step):
        return layout.run(group, values, states, group.contexts(step), bucket_bytes=test_compressors.BUCKET_BYTES)

    for step, kind in enumerate(("normal", "heavy_tails", "ties", "normal")):
        rng = np.random.default_rng(step)
        values = [
            [test_compressors.INPUTS[kind](rng, shape).astype(np.float32) for shape in test_compressors.SHAPES]
            for _ in range(SIZE)
        ]
        results = exchange(
            [[tf.constant(v) for v in values[rank]] for rank in group.ranks], states, tf.constant(step, tf.int64)
        )
        states = [result.states for result in results]
        found.append([tf.nest.map_structure(np.array, (result.sums, result.states)) for result in results])
    return found


def exchanges_of(names):
    return {name: exchanges(test_compressors.ALL[name]) for name in names}


def tower(name):
    """Returns a classifier whose variables are called by its name."""
    return [
        keras.layers.Conv2D(16, 3, activation="relu", name=f"{name}_conv"),
        keras.layers.Flatten(),
        keras.layers.Dense(32, name=f"{name}_hidden"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dense(10, name=name),
    ]


def build(optimizer):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with trainer.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), *tower("digits")])
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def values(variables):
    return [
        [component.numpy() for component in local(v.value if isinstance(v, keras.Variable) else v)] for v in variables
    ]


def fit(model, data, steps):
    steps_per_epoch = min(steps, 40)
    how = {
        "batch_size": 32,
        "epochs": -(-steps // 40),
        "steps_per_epoch": steps_per_epoch,
        "shuffle": False,
        "verbose": 0,
    }
    return trainer.fit(model, *data, **how)


def train_all(compressors):
    """Trains a model of one tower for each compressor, all at once; returns what became of each."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    trainer.compression = test_compressors.PerVariable(
        {f"^{name}(_.*)?/kernel": each for name, each in compressors.items()}
    )
    with trainer.scope():
        model_input, outputs = keras.Input((8, 8, 1)), {}
        for name in compressors:
            found = model_input
            for layer in tower(name):
                found = layer(found)
            outputs[name] = found
        model = keras.Model(model_input, outputs)
        first, *others = compressors
        for kind, name in itertools.product(("_conv", "_hidden", ""), others):  # all begin alike
            model.get_layer(name + kind).set_weights(model.get_layer(first + kind).get_weights())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, STEPS), momentum=0.9),
            dict.fromkeys(compressors, loss),
            metrics=dict.fromkeys(compressors, "accuracy"),
        )
    fit(model, (x, dict.fromkeys(compressors, y)), STEPS)
    images, labels = validation
    measured = trainer.evaluate(
        model, images, dict.fromkeys(compressors, labels), batch_size=90, verbose=0, return_dict=True
    )
    return {
        name: {
            "weights": values([v for v in model.trainable_variables if re.match(f"{name}(_conv|_hidden)?/", v.path)]),
            "accuracy": measured[f"{name}_accuracy"],
        }
        for name in compressors
    }


def train(compressor, optimizer, steps, data=(x, y)):
    trainer.compression = compressor
    model = build(optimizer)
    fit(model, data, steps)
    reduction = get_reduction(model.optimizer)
    states = [s for slots in reduction.states for s in slots] if reduction else []
    return model, {
        "weights": values(model.trainable_variables),
        "states": values(states),
        "iterations": int(getattr(model.optimizer, "inner_optimizer", model.optimizer).iterations.numpy()),
    }


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


BYTES = {name: test_compressors.ALL[name] for name in ("none", "bf16", "fp16", "int8", "int8_sum")}
BYTES |= {"powersgd": test_compressors.PowerSGD(16), "topk": test_compressors.TopK()}
WAITING = ("bf16", "int8_sum")
TRAINED = ("none", "bf16", "fp16", "int8", "int8_sum", "powersgd_feedback", "topk_sampled", "warmup")
ADAM = {
    "accumulation": lambda: keras.optimizers.Adam(2e-3, gradient_accumulation_steps=4),
    "ema_decay_clip": lambda: keras.optimizers.AdamW(2e-3, use_ema=True, weight_decay=0.01, global_clipnorm=1.0),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(2e-3), initial_scale=2.0**20),
}


def options(optimizer, name):
    """All that optimizers do, with error feedback."""
    model, found = train(test_compressors.ALL["int8_feedback"], optimizer, steps=40)
    trainer.save(model, os.path.join(out, f"{name}.keras"))
    return found


def rows(compressor):
    """Returns the weights and the report of a model whose last batch has fewer rows, in executions of several steps."""
    words = np.random.default_rng(1).integers(0, 300, (22, 5))
    trainer.compression = compressor
    keras.utils.set_random_seed(3)
    with trainer.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(300, 7),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=3)
    trainer.fit(model, words, np.arange(22) % 10, batch_size=4, epochs=2, verbose=0)
    return values(model.trainable_variables), trainer.compression_report(model)


def inf(optimizer):
    """One rank's gradient is not finite, at the last step of three."""
    bad = np.array(x[:96])
    bad[64 + 16 :] = np.inf  # of the third batch, the second half
    compressor = test_compressors.ALL["int8_feedback"]
    return {steps: train(compressor, optimizer, steps, (bad, y[:96]))[1] for steps in (2, 3)}


def kinds(compressor):
    """Returns the sums of gradients of several types and shapes, in buckets, each filled with its rank's number plus one."""
    strategy = trainer.strategy
    kinds = (((50, 40), "float32"), ((), "float32"), ((30, 40), "float16"), ((7,), "float64"))
    with trainer.scope():
        variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape, dtype in (*kinds, kinds[0])]
        reduction = Reduction(compressor, variables) if compressor else None

    def fill(variable):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group + 1
        return tf.fill(variable.shape, tf.cast(number, variable.dtype))

    @tf.function(autograph=False)
    def reduce():
        grads, step = strategy.run(lambda: [fill(variable) for variable in variables]), tf.constant(0, tf.int64)
        return reduction(grads, range(len(grads)), step)[0] if reduction else bucketed_all_reduce(strategy, grads, step)

    return [[part.numpy() for part in local(total)] for total in reduce()]


def refused(shape, dtype):
    """Returns what is said against such a variable."""
    try:
        with trainer.scope():
            keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype), shape=shape, dtype=dtype, name="odd")
    except tfdist.ConfigError as e:
        return str(e)
    return ""


def waiting(count, bucket_bytes):
    """Returns how many collectives there are in an exchange of some gradients, and how many of them wait for another one."""
    group, shapes = communicator_for(trainer.strategy), [(100,)] * count

    def exchange():
        layout, values = (
            BucketedReduction(test_compressors.NONE, [("", shape) for shape in shapes]),
            [tf.zeros(shape) for shape in shapes],
        )
        states, members = [()] * count, group.contexts(tf.constant(0, tf.int64))
        return layout.run(group, [values] * len(members), [states] * len(members), members, bucket_bytes=bucket_bytes)

    return collectives_of(exchange)


def collectives_of(function):
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    collectives = [op for op in graph.get_operations() if op.type.startswith("Collective")]

    def before(op):
        found, left = set(), [op]
        while left:
            each = left.pop()
            for other in (*each.control_inputs, *(tensor.op for tensor in each.inputs)):
                if other not in found:
                    found.add(other)
                    left.append(other)
        return found

    return len(collectives), sum(bool(before(op).intersection(collectives)) for op in collectives)


def waiting_optimizer(compressor):
    """Returns the same of the sums that an optimizer asks for, and how many wait for all gradients."""
    strategy = trainer.strategy
    with trainer.scope():
        variables = [keras.Variable(np.ones((50, 40), np.float32)) for _ in range(4)]
        reduction = Reduction(compressor, variables) if compressor else None

    def reduce():
        grads = [strategy.run(lambda: tf.random.normal((50, 40))) for _ in variables]
        step = tf.constant(0, tf.int64)
        return reduction(grads, range(4), step)[0] if reduction else bucketed_all_reduce(strategy, grads, step)

    return collectives_of(reduce)


def sent_bytes(compressor):
    """Returns what is planned and sent in a step, of 42 MB of gradients, and how much was sent: 10 MB at least."""
    before = trainer.strategy.config.bucket_bytes
    set_options(trainer.strategy, bucket_bytes=default_bucket_bytes)
    trainer.compression = compressor
    keras.backend.clear_session()
    with trainer.scope():
        model = synthetic.Synthetic(synthetic.Options()).build_model()
        model.compile("sgd", "sparse_categorical_crossentropy")
    planned = compression_report.planned_bytes(model, compressor, SIZE)
    steps = 3 + 10**7 // planned
    examples = np.ones((4 * SIZE * steps, 1024), np.float32), np.zeros(4 * SIZE * steps)
    sent = network.WireBytes(trainer.cluster, trainer.task)
    trainer.fit(model, *examples, batch_size=4 * SIZE, verbose=0, callbacks=[sent])
    set_options(trainer.strategy, bucket_bytes=before)
    return planned, sent.per_step, (steps - 1) * planned


def of(names):
    return {name: test_compressors.ALL[name] for name in names}


BETWEEN_TASKS = bool(trainer.cluster)
PARTS = {
    "exchanges": lambda: exchanges_of(test_compressors.ALL),
    "quick_exchanges": lambda: exchanges_of(
        [name for name in test_compressors.ALL if name not in test_compressors.SIMILAR]
    ),
    "further_exchanges": lambda: exchanges_of(test_compressors.SIMILAR),
    "trained": lambda: train_all(of(TRAINED)),
    "options": lambda: {name: options(optimizer, name) for name, optimizer in ADAM.items()},
    "rows": lambda: {name: rows(compressor) for name, compressor in of(("none", "bf16", "int8")).items()},
    "inf": lambda: {name: inf(optimizer) for name, optimizer in (("sgd", sgd), ("loss_scale", ADAM["loss_scale"]))},
    "refused": lambda: {"empty": refused((0, 3), None), "16": refused((2,), "bfloat16")},
    "kinds": lambda: {
        name: kinds(compressor) for name, compressor in of(("none", "bf16", "int8", "topk_feedback")).items()
    },
    "waiting": lambda: {(count, size): waiting(count, size) for count, size in ((4, 0), (4, 800), (4, 400), (18, 400))},
    "waiting_optimizer": lambda: (
        BETWEEN_TASKS
        and {"none": waiting_optimizer(None)} | {name: waiting_optimizer(each) for name, each in of(WAITING).items()}
    ),
    "bytes": lambda: BETWEEN_TASKS and {name: sent_bytes(compressor) for name, compressor in BYTES.items()},
}
harness.store(out, RANK, {"between_tasks": BETWEEN_TASKS} | {part: PARTS[part]() for part in parts})
