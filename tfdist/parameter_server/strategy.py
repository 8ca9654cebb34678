"""The strategy whose variables live on parameter servers; each worker computes steps asynchronously.

Three kinds of Keras' variables stay on the chief instead of the servers. Only the chief changes them, so that they
count exactly: metrics, the optimizer's scalars (iterations, learning rate) and the states of seed generators. Workers
read them with each step (see `parameter_server/worker_step.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data
from tfdist.cluster import ClusterSpec, connection_timeout, greeting, preflight
from tfdist.cluster.spec import ClusterTask
from tfdist.compat import keras_internals, optimizer_search
from tfdist.config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.parameter_server import server
from tfdist.runtime.end import hooks
from tfdist.strategies import base
from tfdist.strategies.model_methods import USE_TRAINER

_DISTRIBUTES_ITSELF = (
    "Under parameter_server the Trainer distributes data itself: give fit, evaluate or predict the dataset, or the function "
    "(tf.distribute.InputContext) -> tf.data.Dataset, in place of the result of the strategy's experimental_distribute_dataset or "
    "distribute_datasets_from_function."
)
CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerStrategy(base.KerasStrategy, tf.distribute.ParameterServerStrategy):
    """The strategy that trains asynchronously on the workers of a cluster, with variables on its parameter servers.

    Created in the chief's process, once all other tasks can be reached. `placement` chooses the server of a variable: `"round_robin"`, the next
    server; `"by_bytes"`, the server with the fewest bytes. Optimizer slots are placed with their variable. A server may be silent for `start_timeout` s.
    `max_staleness` is the limit of `Staleness`.
    """

    cluster: ClusterSpec

    def __init__(
        self,
        cluster: ClusterSpec,
        placement: str = "round_robin",
        start_timeout: float = preflight.START_TIMEOUT,
        max_staleness: int | None = None,
    ):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        self.cluster = cluster
        self.start_timeout = start_timeout
        self.max_staleness = max_staleness
        self._by_bytes = placement == "by_bytes"
        super().__init__(resolver)
        if self.num_replicas_in_sync > 1:
            raise ConfigError(
                f"Each worker has {self.num_replicas_in_sync} GPUs, and parameter_server uses one: start a worker for "
                "each GPU, with CUDA_VISIBLE_DEVICES."
            )
        # Anchors: TensorFlow places a variable by colocation with another variable.
        self._chief = _anchor(CHIEF_DEVICE)
        self._servers = [
            _anchor(f"/job:ps/replica:0/task:{index}/device:CPU:0") for index in range(len(cluster.jobs["ps"]))
        ]
        self.bytes_per_server = [0] * len(self._servers)

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if lives_on_chief(kwargs.get("name"), kwargs.get("synchronization"), kwargs.get("aggregation")):
            kwargs["colocate_with"] = self._chief
            return next_creator(**kwargs)
        if self._by_bytes and kwargs.get("colocate_with") is None:
            kwargs["colocate_with"] = self._servers[self.bytes_per_server.index(min(self.bytes_per_server))]
        variable = next_creator(**kwargs)
        self.bytes_per_server[server_index(variable)] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Data:
        """Raises an error: the Trainer takes the dataset itself."""
        raise self._distribution_error()

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., tf.data.Dataset], options: tf.distribute.InputOptions | None = None
    ) -> Data:
        """Raises an error: the Trainer takes the function itself."""
        raise self._distribution_error()

    def _distribution_error(self) -> ConfigError:
        return ConfigError(USE_TRAINER.format(self.config.name) if self.trainer is None else _DISTRIBUTES_ITSELF)


def lives_on_chief(
    name: str | None, synchronization: tf.VariableSynchronization | None, aggregation: tf.VariableAggregation | None
) -> bool:
    """Returns whether a variable stays on the chief: a metric's variable, a scalar of an optimizer, or a seed generator's state."""
    scalar = name in keras_internals.OPTIMIZER_SCALARS and aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    return scalar or name == keras_internals.SEED_STATE or synchronization == tf.VariableSynchronization.ON_READ


def server_index(variable: tf.Variable) -> int:
    """Returns the index of the server that holds a variable."""
    return int(tf.DeviceSpec.from_string(variable.device).task)


def bytes_per_server(model: keras.Model) -> dict[str, int]:
    """Returns the bytes of a model's and its optimizers' variables on each server: `{"ps:0": 1024, ...}`."""
    strategy = model.distribute_strategy
    loads = {f"ps:{index}": 0 for index in range(len(strategy.cluster.jobs["ps"]))}
    variables = list(model.variables)
    for optimizer in optimizer_search.optimizers(model):
        variables += optimizer.variables
    for value in {id(variable): variable.value for variable in variables}.values():
        spec = tf.DeviceSpec.from_string(value.device)
        if spec.job == "ps":
            loads[f"ps:{spec.task}"] += value.shape.num_elements() * value.dtype.size
    return loads


def _anchor(device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(0, trainable=False, name="anchor")


def parameter_server(
    config: StrategyConfig, cluster: ClusterTask | None, start_timeout: float, grace_seconds: float
) -> tf.distribute.Strategy:
    """Connects the chief with workers and servers, and returns the strategy on the chief. The factory of its row in `STRATEGIES`.

    In a worker or a server this call serves the chief. It ends the process when the chief has exited, with the chief's exit code.
    `grace_seconds` is how long a worker or server that receives SIGTERM waits for the chief to save.

    Raises:
        ClusterError: A task cannot be reached in time, this task's port is taken, or tasks run different versions.
        ConfigError: There is no cluster, its jobs do not fit, or this task is an evaluator.
    """
    if cluster is None:
        raise ConfigError(
            "parameter_server needs a cluster: start its tasks with a scheduler, with --hosts, with TF_CONFIG in each task's "
            "environment, or with tfdist launch --workers=2 --ps=1 -- python script.py"
        )
    spec, task = cluster
    faults = list(spec.parameter_server_faults())
    if faults:
        if list(spec.jobs) == ["worker"]:
            remedy = "Under a scheduler, set the number of ranks that serve: --config.cluster.ps=1, or tfdist.find_cluster(ps=1)."
            faults = [f"{fault} {remedy}" for fault in faults]
        raise ConfigError(faults)
    if task.type == "evaluator":
        raise ConfigError("An evaluator does not train: use strategy one_device in its process.")
    preflight.bypass_proxies(spec)
    connection_timeout.keep_connections(spec)
    if task.type != "chief":
        with greeting.listening_for_peers(spec, task):
            # Versions are compared before TensorFlow's server takes the port: that server reports no version.
            preflight.wait_until_reachable(spec, [spec.chief], start_timeout)
        server.serve(spec, task, start_timeout, grace_seconds)
    with greeting.listening_for_peers(spec, task):
        # TensorFlow would wait without a message. Every other task compares versions before it serves.
        others = [other for other in spec.tasks() if other != task]
        preflight.wait_until_reachable(spec, others, start_timeout)
        preflight.wait_until_reachable(spec, others, start_timeout, serving=True)
    with preflight.startup_watchdog(spec, task, start_timeout):
        strategy = ParameterServerStrategy(spec, config.placement, start_timeout, config.max_staleness)
    hooks.at_end(hooks.Stage.PEERS, server.publish_exit_code, spec)
    return strategy
