"""The table of features and options that exclude each other. No TensorFlow here.

The place that knows which features are present asks this table: the configuration before TensorFlow is imported, and the code that has the
strategy, the model or the optimizer for what only they tell. docs/limits.md has the same table (`tools/site/exclusions.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from tfdist.errors import ConfigError

# Keras' optimizers that update each element independently of all others.
ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam", "Lion")

# Each feature's key, and its name as users write it.
FEATURES = {
    # Options of a strategy
    "transport": "strategy.transport",
    "devices": "strategy.devices",
    "replicas": "strategy.replicas",
    "several_devices": "several devices per worker",
    "shard_optimizer": "strategy.shard_optimizer",
    "whole_optimizer": "strategy.shard_optimizer=False",
    "weights_dtype": "strategy.weights_dtype=bfloat16",
    "sync_every": "strategy.sync_every",
    "every_step": "strategy.sync_every=0",
    "outer": "strategy.outer",
    "batch_shares": "strategy.batch_shares=by_speed",
    "max_staleness": "strategy.max_staleness",
    "features": "strategy.features",
    "lazy_rows": "strategy.row_updates=lazy",
    # Strategies and devices
    "not_workers": "a strategy other than multi_worker_mirrored",
    "not_mirrors": "a strategy other than mirrored and multi_worker_mirrored",
    "synchronous": "a strategy other than parameter_server",
    "not_compressing": "parameter_server, central_storage or tpu",
    "all_devices": "a strategy that uses all devices, such as parameter_server",
    "parameter_server": "parameter_server",
    "central_storage": "central_storage",
    "several_replicas": "several replicas",
    "gpus_of_workers": "several GPUs of one of several workers",
    # A run
    "compression": "compression",
    "deterministic": "deterministic operations",
    "learning_rate_scaling": "learning_rate_scaling",
    "skip_steps": "nan_policy 'skip'",
    "jit_compile": "jit_compile=True",
    "run_eagerly": "run_eagerly=True",
    "no_backups": "backup.save_freq=never",
    "evaluator": "cluster.evaluator",
    "elastic": "a range of cluster.workers",
    "ray": "cluster.ray",
    "ps": "cluster.ps",
    "SwapEMAWeights": "the callback SwapEMAWeights",
    # Optimizers
    "mixed_float16": "mixed_float16 (a LossScaleOptimizer)",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "use_ema": "use_ema=True",
    "ema_overwrite_frequency": "ema_overwrite_frequency",
    "weight_decay": "weight_decay",
    "replica_clip": "an optimizer that clips the gradient of each replica",
    "not_elementwise": "an optimizer such as Lamb, Muon or Adafactor",
    "built_optimizer": "an optimizer that was built before",
    "own_apply": "an optimizer that overrides apply_gradients",
    "MultiOptimizer": "MultiOptimizer",
    "Muon": "the optimizer Muon",
    "Nadam": "the optimizer Nadam",
    # Models
    "mesh": "keras.distribution.ModelParallel",
    "sharded_table": "tfdist.layers.Embedding with several shards",
    "worker_table": "tfdist.layers.Embedding with rows on the workers",
    "regularizer": "embeddings_regularizer",
    "synchronized": "BatchNormalization(synchronized=True)",
    "stateful": "stateful=True of a layer",
    "spectral": "SpectralNormalization",
    "float8": "float8 layers",
    "own_train_step": "a train_step of your own",
    "own_compute_metrics": "a compute_metrics of your own",
    "function_step": "a train_step that is a tf.function",
}


class Relation(NamedTuple):
    """Two features that exclude each other.

    Attributes:
        one: The key of a feature.
        other: The key of the feature or strategy that excludes it.
        reason: The rest of the sentence "`one` is not possible with `other`, ...".
        remedy: The user's choices, beginning with a verb.
    """

    one: str
    other: str
    reason: str
    remedy: str

    def text(self, names: Mapping[str, str]) -> str:
        """Returns the error for users. `names` has other names than `FEATURES`, such as one with the value received."""
        one, other = (names.get(key) or FEATURES[key] for key in (self.one, self.other))
        return f"{one} is not possible with {other}, {self.reason}; {self.remedy}."


_SAVE = "use --config.backup.save_freq=epoch or a number of steps"
_LEAVE_ONE = "leave one of them out"
_LEAVE_OUT = "leave it out"
_NOT_ALONE = "whose workers do not wait for each other"
_SHARED = "whose replicas share their variables"
_ONE_READ = "whose steps read a variable once and write it at their end"
_ONE_DEVICE = "because a worker measures and trains by itself with one device (yet)"
_ONE_GPU = "because only one GPU of a worker sends and receives pieces and rows (yet)"
_NOT_KNOWN = "which is not known to update each element independently"
_UNCOMPILED = "compile the model with jit_compile=False"
_FOR_WORKERS = "because it is for multi_worker_mirrored"
_ELEMENTWISE = f"use one of {', '.join(ELEMENTWISE)}"
_WHOLE_TABLE = "give tfdist.layers.Embedding shards=1"

RELATIONS = (
    # Options of a strategy, and strategies
    Relation("transport", "not_workers", _FOR_WORKERS, _LEAVE_OUT),
    Relation("sync_every", "not_workers", _FOR_WORKERS, _LEAVE_OUT),
    Relation("batch_shares", "not_workers", _FOR_WORKERS, _LEAVE_OUT),
    Relation("shard_optimizer", "not_mirrors", "because it is for mirrored and multi_worker_mirrored", _LEAVE_OUT),
    Relation("max_staleness", "synchronous", "because it is for parameter_server", _LEAVE_OUT),
    Relation(
        "replicas",
        "not_mirrors",
        "which has no number of replicas to share among workers",
        "use strategy.name=mirrored or multi_worker_mirrored, or leave it at 0",
    ),
    Relation(
        "devices", "all_devices", "which uses all GPUs it sees, or the CPU", "choose GPUs with CUDA_VISIBLE_DEVICES"
    ),
    Relation("replicas", "devices", "because both set the devices of a worker", _LEAVE_ONE),
    Relation(
        "compression",
        "not_compressing",
        "because tfdist does not sum the gradients there (yet)",
        "use strategy multi_worker_mirrored or mirrored, or no compression",
    ),
    Relation("features", "parameter_server", _NOT_ALONE, _LEAVE_OUT),
    Relation(
        "learning_rate_scaling",
        "parameter_server",
        "where each step runs on one worker",
        "use learning_rate_scaling=none",
    ),
    Relation(
        "skip_steps",
        "parameter_server",
        "whose workers update variables that are on other machines",
        "use 'stop', which looks at the loss, or 'ignore'",
    ),
    # Options of a cluster
    Relation(
        "evaluator",
        "no_backups",
        "because it evaluates backups",
        f"{_SAVE}, or leave cluster.evaluator at 0",
    ),
    Relation("elastic", "no_backups", "because it continues from backups", _SAVE),
    Relation(
        "elastic",
        "devices",
        "which fixes the number of replicas of each worker",
        "use --config.strategy.replicas=N, the number of replicas of all workers, instead",
    ),
    Relation(
        "elastic",
        "parameter_server",
        "where a lost worker starts again alone, and the others train on",
        "give one number, and max_restarts",
    ),
    Relation(
        "ray", "ps", "because Ray starts synchronous workers", "leave cluster.ray empty, or leave cluster.ps at 0"
    ),
    # Options of a strategy, and each other
    Relation(
        "weights_dtype",
        "whole_optimizer",
        "because workers then send no weights",
        "set strategy.shard_optimizer=True, or leave both out",
    ),
    Relation(
        "outer",
        "every_step",
        "because it needs the number of updates between two exchanges",
        "set strategy.sync_every, or leave both out",
    ),
    Relation(
        "sync_every",
        "shard_optimizer",
        "because each worker updates all weights by itself",
        _LEAVE_ONE,
    ),
    Relation("sync_every", "several_devices", _ONE_DEVICE, "start a worker for each device"),
    Relation("batch_shares", "several_devices", _ONE_DEVICE, "start a worker for each device"),
    Relation(
        "batch_shares",
        "deterministic",
        "because TensorFlow then has no clock to measure a step with",
        _LEAVE_ONE,
    ),
    # The mesh
    Relation(
        "mesh",
        "shard_optimizer",
        "because the optimizer's state is split as its variables are (yet)",
        "remove shard_optimizer",
    ),
    Relation("mesh", "sync_every", "because workers that train alone exchange no pieces (yet)", "remove sync_every"),
    Relation(
        "mesh",
        "batch_shares",
        "because workers with pieces of one model read the same examples (yet)",
        "remove batch_shares",
    ),
    Relation(
        "mesh",
        "compression",
        "because workers with other pieces would lose other parts of the gradients of whole variables (yet)",
        "remove compression",
    ),
    Relation("mesh", "sharded_table", "because a layout map splits whole tables (yet)", "use shards=1"),
    Relation("mesh", "jit_compile", "because XLA has no collectives", _UNCOMPILED),
    Relation("mesh", "mixed_float16", "because pieces have no scaled losses (yet)", "use mixed_bfloat16"),
    Relation(
        "mesh",
        "not_elementwise",
        _NOT_KNOWN,
        f"{_ELEMENTWISE}, or leave variables out of the layout map",
    ),
    Relation(
        "mesh",
        "built_optimizer",
        "because its slots have the shapes of whole variables (yet)",
        "compile the model with a new optimizer",
    ),
    # The split optimizer
    Relation(
        "shard_optimizer",
        "not_elementwise",
        _NOT_KNOWN,
        f"{_ELEMENTWISE}, or set shard_optimizer=False",
    ),
    Relation(
        "shard_optimizer",
        "gpus_of_workers",
        _ONE_GPU,
        "start a worker for each GPU, or set shard_optimizer=False",
    ),
    Relation(
        "SwapEMAWeights",
        "shard_optimizer",
        "which splits the moving averages",
        "remove the callback, as the weights are the averages when fit ends, or set shard_optimizer=False",
    ),
    # Tables
    Relation(
        "sharded_table",
        "shard_optimizer",
        "because the workers split variables in another way (yet)",
        "use shards=1 or shard_optimizer=False",
    ),
    Relation(
        "worker_table",
        "sync_every",
        "which needs each worker to hold all weights",
        f"{_WHOLE_TABLE}, or leave sync_every out",
    ),
    Relation(
        "worker_table",
        "regularizer",
        "whose sum no worker can compute, because each holds some rows",
        "use shards=1 or no regularizer",
    ),
    Relation(
        "worker_table",
        "not_elementwise",
        _NOT_KNOWN,
        f"{_ELEMENTWISE}, or {_WHOLE_TABLE}",
    ),
    Relation(
        "worker_table",
        "replica_clip",
        "because the gradients of rows arrive as a sum (yet)",
        f"change the optimizer, or {_WHOLE_TABLE}",
    ),
    Relation("worker_table", "jit_compile", "because XLA has no collectives", f"{_UNCOMPILED}, or {_WHOLE_TABLE}"),
    Relation("worker_table", "gpus_of_workers", _ONE_GPU, f"start a worker for each GPU, or {_WHOLE_TABLE}"),
    Relation(
        "lazy_rows",
        "not_elementwise",
        _NOT_KNOWN,
        f"{_ELEMENTWISE}, or set row_updates='auto'",
    ),
    Relation(
        "lazy_rows",
        "use_ema",
        "because the averages of all rows move in each step",
        "use use_ema=False, or set row_updates='auto'",
    ),
    Relation(
        "lazy_rows",
        "weight_decay",
        "which shrinks all rows in each step",
        "use optimizer.exclude_from_weight_decay(var_names=['embeddings']), or set row_updates='auto'",
    ),
    # Workers that train alone
    Relation(
        "sync_every",
        "synchronized",
        "because the layer would exchange moments at each step",
        "leave synchronized out; moving statistics are averaged anyway",
    ),
    Relation("sync_every", "use_ema", "because each worker would average other weights (yet)", _LEAVE_ONE),
    # Models and optimizers, and strategies
    Relation("jit_compile", "parameter_server", "whose variables are on other machines", _UNCOMPILED),
    Relation(
        "run_eagerly",
        "parameter_server",
        "whose steps run on other machines",
        "compile the model with run_eagerly=False",
    ),
    Relation("mixed_float16", "parameter_server", _NOT_ALONE, "use mixed_bfloat16"),
    Relation("gradient_accumulation_steps", "parameter_server", _NOT_ALONE, "use a larger batch"),
    Relation("ema_overwrite_frequency", "parameter_server", _NOT_ALONE, _LEAVE_OUT),
    Relation("spectral", "parameter_server", _ONE_READ, "remove it"),
    Relation("Muon", "parameter_server", _ONE_READ, "use AdamW"),
    Relation("MultiOptimizer", "parameter_server", "whose workers apply one optimizer", "use one optimizer"),
    Relation("jit_compile", "central_storage", _SHARED, "use strategy mirrored"),
    Relation("mixed_float16", "central_storage", _SHARED, "use strategy mirrored"),
    Relation("use_ema", "central_storage", _SHARED, "use strategy mirrored"),
    Relation("Nadam", "central_storage", _SHARED, "use strategy mirrored"),
    # Models and optimizers, and several replicas
    Relation(
        "MultiOptimizer",
        "several_replicas",
        "because tfdist reduces the gradients of one optimizer",
        "use one optimizer",
    ),
    Relation(
        "own_apply",
        "several_replicas",
        "because it overrides apply_gradients, which receives gradients before they are reduced",
        "let it override apply or update_step",
    ),
    Relation(
        "stateful",
        "several_replicas",
        "because each replica would keep only the state of its share of a batch",
        "use stateful=False, or one replica",
    ),
    Relation(
        "float8",
        "several_replicas",
        "because they return new scales in place of gradients, which cannot be summed over replicas",
        "use mixed_bfloat16",
    ),
    Relation(
        "function_step",
        "several_replicas",
        "because TensorFlow does not let replicas reduce in it",
        "leave @tf.function out, as the Trainer compiles the step",
    ),
    Relation(
        "jit_compile",
        "synchronized",
        "because the layer sums over the replicas during the step, which XLA cannot compile",
        f"{_UNCOMPILED}, or make the layer without synchronized",
    ),
    Relation(
        "jit_compile",
        "own_train_step",
        "because XLA compiles a step up to its gradients, and it may do more after them",
        _UNCOMPILED,
    ),
    Relation(
        "jit_compile",
        "own_compute_metrics",
        "because XLA hides the values that it computes from metrics, so that the logs would be means of the replicas' values",
        f"{_UNCOMPILED}, or override get_metrics_result instead",
    ),
)


def present(features: Mapping[str, tuple[str, object]]) -> dict[str, str]:
    """Returns the names of the features that are present, by key. `features` has for each key the name, and whether it is present."""
    return {key: name for key, (name, is_present) in features.items() if is_present}


def faults(asked: Collection[str], of: str = "") -> Iterator[str]:
    """Yields the sentence of every pair of features that exclude each other.

    Args:
        asked: The keys of the features that are asked for; as a dict, with their names as the user wrote them, or an empty text for the
            name in `FEATURES`. The names of strategies that are not in the table have no effect.
        of: The key of a feature, to which all pairs must belong; empty means all pairs.
    """
    names = asked if isinstance(asked, Mapping) else {}
    for relation in RELATIONS:
        pair = {relation.one, relation.other}
        if pair <= {*asked} and (not of or of in pair):
            yield relation.text(names)


def check(asked: Collection[str], of: str = "") -> None:
    """Raises a ConfigError with the sentence of every pair (`faults`)."""
    known = list(faults(asked, of))
    if known:
        raise ConfigError(known)


def strategy_faults(asked: Mapping[str, str], strategy: str, refuses: Mapping[str, str]) -> Iterator[str]:
    """Yields the sentence of every feature asked for that a strategy of your own refuses (`StrategyTraits.refuses`)."""
    for key, end in refuses.items():
        if key in asked:
            yield f"{asked[key] or FEATURES.get(key, key)} is not possible with {strategy}, {end}."
