"""A mesh of workers, for `keras.distribution.ModelParallel`: variables that live as pieces on the workers of a model group.

Rank = data x M + model. Workers with equal pieces form a data group: their strategy, which the model and the Trainer use, counts data
groups alone, so that batch shares, losses, dropout and sums of gradients need no further code. Workers with equal examples form a model
group, whose communicator joins the pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.cluster import TaskSpec
from tfdist.collectives import finished, hardware, own_time, transport_choice
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.ranks import Ranks
from tfdist.compat import call_stack, keras_distribution, keras_internals, tf_cluster, tf_internals
from tfdist.compat.laid_out import LaidOutVariable
from tfdist.compat.split_value import become
from tfdist.config import relations
from tfdist.errors import ClusterError, ConfigError
from tfdist.replicas import step_context
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress
from tfdist.sharding.layouts import Grid, Layout
from tfdist.sharding.split import Index, Split
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

# What the strategy of a data group takes over from the strategy of all workers.
_INHERITED = (*("traits", "cluster_task", "transport", "transport_reason", "unlike_processors"),)
_ENDED = re.compile(r"rank (\d+) has ended")  # the text of a transport's error
_PUBLISHED_WITHIN = 2.0  # seconds in which a worker that has ended may have published that its program has finished


class GroupRanks(Ranks):
    """Exchanges values among the workers of a communicator, within the scope of any strategy, too."""

    def __init__(self, group: Communicator, rank: int, names: Sequence[str]):
        self._group = group
        self.names = names
        self.rank = rank
        self.size = len(names)

    def _reduce(self, value: Any) -> tf.Tensor:
        with own_time.waiting(), self.naming_ended():
            return self._group.all_reduce([[tf.convert_to_tensor(value)]])[0][0]

    @contextlib.contextmanager
    def naming_ended(self) -> Iterator[None]:
        """Names the worker that has ended while this one waits for it in an exchange of the context.

        Raises:
            ClusterError: A worker has ended.
        """
        try:
            yield
        except ConnectionError as e:
            match = _ENDED.fullmatch(str(e))
            if match is None:
                raise
            ended, place = self.names[int(match[1])], call_stack.users_place()
            waits = f"{self.names[self.rank]} waits for it{place and f' at {place}'}"
            loss = progress.Loss(ended, f"{ended} has ended, and {waits}", f"read the log of {ended} for the cause")
            if _has_finished(ended):
                cause = f"{ended} has finished its program (exit code 0), and {waits}"
                loss = progress.Loss(ended, cause, "make the call of that line on every worker")
            progress.write(lost=loss)
            raise ClusterError(f"{loss.cause}: {loss.remedy}") from progress.shown_cause(e)


def _has_finished(name: str) -> bool:
    """Returns whether the program of a task that has ended has finished well, which it publishes as it ends."""
    kind, _, index = name.rpartition(":")
    until = time.monotonic() + _PUBLISHED_WITHIN
    while not (found := finished.is_published(TaskSpec(kind, int(index)))) and time.monotonic() < until:
        time.sleep(0.1)
    return found


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The place of this worker in a mesh.

    Attributes:
        grid: The ranks.
        rank: This worker's rank.
        layout_map: Keras' map from paths of variables to layouts.
        everyone: Exchanges values among all workers.
        group: The communicator of this worker's model group.
        group_ranks: Exchanges values in the model group.
        paths: The paths of all variables that were created.
        notified: The keys of the layout map that were reported.
    """

    grid: Grid
    rank: int
    layout_map: Any
    everyone: Ranks
    group: Communicator
    group_ranks: GroupRanks
    paths: set[str] = dataclasses.field(default_factory=set)
    notified: set[str] = dataclasses.field(default_factory=set)

    def initial_value(self, creation: dict[str, Any]) -> Callable[[], tf.Tensor]:
        """Returns the initial value of a variable, equal in the model group, or this worker's piece of it. Lays out Keras' variable.

        `creation` are the arguments of the creation of a tf.Variable.
        """
        holder = self._lay_out(call_stack.created_variable())
        given = creation.get("initial_value")

        def initial() -> tf.Tensor:
            value = tf.convert_to_tensor(given() if callable(given) else given, creation.get("dtype"))
            if value.dtype not in (tf.string, tf.bool):
                value = self.group_ranks.broadcast(value)
            return holder.cut(value) if holder else value

        return initial

    def sum_in_group(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over the workers of the model group. A collective."""
        return self.group.all_reduce([[value]])[0][0]

    def warn_of_unmatched(self, example: str) -> None:
        """Warns once of the keys of the layout map that match no variable so far; `example` is the path of a variable."""
        # Keys of the outputs of layers match no variable, and users need not remove them.
        known = {*self.paths, *(f"{path.rpartition('/')[0]}/output" for path in self.paths)}
        unmatched = []
        for key, layout in self.layout_map.items():
            alone = keras.distribution.LayoutMap(self.layout_map.device_mesh)
            alone[key] = layout
            if not key.endswith("output") and not any(alone[path] for path in known):
                unmatched.append(key)
        if not self.notified.issuperset(unmatched):
            self.notified.update(unmatched)
            logger.warning(
                f"The layout map's keys {', '.join(map(repr, unmatched))} match no variable so far, so that their layouts have no effect. Write keys "
                f"that match whole paths, such as {example!r}, with '.*' for the parts that differ."
            )

    def _lay_out(self, variable: keras.Variable | None) -> _Holder | None:
        if variable is not None:
            self.paths.add(variable.path)
        # Moving statistics and other variables that steps assign stay whole.
        if variable is None or not variable.trainable or not call_stack.is_creating_keras_weight():
            return None
        try:
            found = self.layout_map[variable.path]
        except ValueError as e:
            raise ConfigError(
                f"The layout map has two layouts for one variable: {e} Let one expression match it."
            ) from e
        if found is None or not any(found.axes):
            return None
        layout = Layout(tuple(variable.shape), tuple(found.axes), self.grid)
        fault = layout.fault()
        if fault:
            raise ConfigError(f"The layout {layout.axes} of the variable {variable.path} {fault}. Change the layout.")
        holder = _Holder(layout, self)
        become(
            variable, LaidOutVariable, holder
        )  # the tf.Variable that is being created will have the shape of the piece
        return holder


def split(world: Any, distribution: Any) -> MultiWorkerMirroredStrategy:
    """Returns the strategy of this worker's data group, with the mesh of all workers. A collective.

    Args:
        world: The strategy of all workers, from `create_strategy`.
        distribution: A `keras.distribution.ModelParallel`.
    """
    devices = distribution.device_mesh
    grid = Grid(tuple(devices.axis_names), tuple(devices.shape), distribution.batch_dim_name)
    check(world, grid)
    cluster, task = world.cluster_task
    tasks = cluster.training_tasks()
    rank = tasks.index(task)

    def connect(members: Sequence[int]) -> MultiWorkerMirroredStrategy:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=world.config.timeout_seconds or None)
        strategy = MultiWorkerMirroredStrategy(world.cluster_resolver, options, members=members)
        if hardware.on_gpus(world):  # NCCL wants one order of the collectives of all groups that share a GPU
            tf_cluster.share_order(strategy, world)
        names = [str(tasks[member]) for member in members]
        addresses = [cluster.address(tasks[member]) for member in members]
        # MPI has no group of some of its processes here.
        wanted = "auto" if world.transport == "mpi" else world.transport
        timeout = world.config.timeout_seconds or 0.0
        choice = transport_choice.connect(strategy, names, addresses, members.index(rank), wanted, timeout)
        strategy.communicator = choice.communicator
        return strategy

    data = connect(grid.data_group(rank))
    for name in _INHERITED:
        setattr(data, name, getattr(world, name))
    members = grid.model_group(rank)
    group: Any = connect(members).communicator
    ranks = GroupRanks(group, members.index(rank), [str(tasks[member]) for member in members])
    everyone = GroupRanks(world.communicator, rank, list(map(str, tasks)))
    data.mesh = Mesh(grid, rank, keras_distribution.layout_map(distribution), everyone, group, ranks)
    data.configure(world.config)
    return data


def check(world: Any, grid: Grid) -> None:
    """Raises ConfigError unless the workers of a strategy are those of a mesh."""
    workers = world.num_workers
    if world.cluster_task is None or workers != grid.ranks or world.num_replicas_in_sync != workers:
        raise ConfigError(
            f"The DeviceMesh {grid.sizes} of keras.distribution.ModelParallel has {grid.ranks} devices, and there must be one for each worker, "
            f"with one device each. Received: {workers} workers with {world.num_replicas_in_sync} devices."
        )
    relations.check({"mesh": "", **world.config.asked()}, "mesh")


@dataclasses.dataclass(frozen=True, eq=False)
class _Holder:
    """Reads and writes the values of one variable (`laid_out.Holder`)."""

    layout: Layout
    mesh: Mesh

    @property
    def copies(self) -> int:
        """The number of workers of a model group that hold the same piece."""
        pieces = math.prod(self.layout.shape) // math.prod(self.layout.piece_shape)
        return self.mesh.group.size // pieces

    @property
    def split(self) -> Split:
        """The elements that each worker stores."""
        return self.layout.split

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.mesh.rank

    @property
    def index(self) -> Index:
        """The elements that this worker holds."""
        return self.layout.slices(self.mesh.rank)

    @property
    def axis(self) -> int | None:
        """The dimension that is split in one part for each worker of a model group, if no other one is split; else None."""
        split = [axis for axis, name in enumerate(self.layout.axes) if name is not None]
        return split[0] if len(split) == 1 and self.copies == 1 else None

    def cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns this worker's piece of a whole value."""
        return whole[self.index]

    def join(self, piece: tf.Tensor) -> tf.Tensor:
        """Returns the whole value from the pieces of the model group. A collective."""
        return self._joined(piece, lane=0)

    def _joined(self, piece: tf.Tensor, lane: int) -> tf.Tensor:
        sizes, index, order = self.layout.joining()
        with self.mesh.group_ranks.naming_ended():
            flat = self.mesh.group.gather_parts(tf.reshape(piece, [-1]), lane)
        parts = tf.reshape(flat, [*sizes, *self.layout.piece_shape])[index]
        return tf.reshape(tf.transpose(parts, order), self.layout.shape)

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the whole value of the variable with the piece. A collective, at the first read in a step."""
        if keras_internals.in_symbolic_scope():
            return tf.zeros(self.layout.shape, variable.dtype)
        step = step_context.current()
        if step is None:
            return self._whole(variable, {})
        if step.is_compiled:
            relations.check(("mesh", "jit_compile"))
        if step.is_applying:
            # An update changes the values before a constraint reads them. All workers take the same branches of it.
            return self._whole(variable, {})
        gathered = step.gathered
        if step.graph is None:
            return self._whole(variable, gathered if tf.executing_eagerly() else {})
        if not tf_internals.is_within(step.graph):
            raise ConfigError(
                f"A layer reads a variable of shape {self.layout.shape} within a tf.function, where workers cannot wait for each other. Remove the "
                "tf.function from the layer, or leave the variable out of the LayoutMap of keras.distribution.ModelParallel."
            )
        # Exchanges have an order, which workers need, within one graph only. So loops and branches take values from the step's graph.
        with step.graph.as_default():
            return self._whole(variable, gathered)

    def write(self, variable: tf.Variable, whole: tf.Tensor) -> None:
        """Assigns this worker's piece of a whole value."""
        variable.assign(self.cut(tf.cast(whole, variable.dtype)))
        step = step_context.current()
        if step is not None:
            step.gathered.pop(self, None)

    def _whole(self, variable: tf.Variable, gathered: dict[Any, tf.Tensor]) -> tf.Tensor:
        piece = tf.convert_to_tensor(variable)
        if self not in gathered:
            # In lane 0, the first exchange of a step waits until all workers of the group have begun the step.
            gathered[self] = self._joined(tf.stop_gradient(piece), lane=1 if gathered else 0)

        # All workers of the group compute the same gradient of the whole value, of which each takes its part: no communication.
        @tf.custom_gradient
        def joined(piece: tf.Tensor) -> Structure:
            return gathered[self], lambda upstream: self.cut(tf.convert_to_tensor(upstream))

        return joined(piece)
