"""Random numbers that differ between replicas and are equal in all runs with the same seed.

- `tf.random.*` and `tf.nn.dropout` take their seed from the graph that is traced. `replica_seed` changes it for each replica.
- `keras.random.*` without a seed draws from a generator of the thread, and each replica is traced in a new thread.
  `GlobalSeedGenerator` replaces it.
- A seed generator has a state on each replica. `assign_seed` keeps the states apart.
- An optimizer's update draws the same numbers on all replicas (`UpdateSeeds`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import keras_internals, tf_internals

# Added to a seed once per replica. Odd and large, so that the seeds of two layers, which Keras draws below 1e9, stay
# different on all replicas.
SEED_STRIDE = 0x5851F42D
_DEPTH_STRIDE = 0x2545F491  # added once per enclosing graph: TensorFlow numbers the operations of each graph from 0


@contextlib.contextmanager
def replica_seed(replica: int) -> Iterator[Callable[[int], None]]:
    """Sets TensorFlow's seed to the seed of `replica` while a step is traced or runs eagerly.

    Does nothing if no seed is set, because TensorFlow then draws from the system's entropy. Yields a function that
    switches the seed of the step's graph to that of another replica. Each replica counts its own random operations, whichever replicas are traced in the same graph.
    """
    holder = tf_internals.seed_holder()
    seed = tf_internals.get_seed(holder)
    depth = tf_internals.graph_depth(holder)

    first = tf_internals.get_draws(holder)
    draws: dict[int, int] = {}  # by replica
    current = replica

    def move(to: int) -> None:
        nonlocal current
        draws[current] = tf_internals.get_draws(holder)
        current = to
        tf_internals.set_draws(holder, draws.get(to, first))
        if seed is not None:
            tf_internals.set_seed(holder, (seed + to * SEED_STRIDE + depth * _DEPTH_STRIDE) % (2**31 - 1))

    move(replica)
    try:
        yield move
    finally:
        tf_internals.set_draws(holder, max(tf_internals.get_draws(holder), *draws.values()))
        tf_internals.set_seed(holder, seed)


class GlobalSeedGenerator:
    """A replacement of the global generator from which `keras.random.*` draws without a seed.

    For the replicas it creates a `keras.random.SeedGenerator` in the strategy's scope at the first draw. Keras would create one in
    each replica's thread, where variables cannot be created. Outside of the replicas it draws from a generator of this process:
    one worker may draw alone there, and creating a variable in the scope would be a collective that waits for the other workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._shared: keras.random.SeedGenerator | None = None
        self._own: keras.random.SeedGenerator | None = None

    @classmethod
    def for_current_thread(cls, strategy: tf.distribute.Strategy) -> GlobalSeedGenerator:
        """Returns this thread's generator; a new one after `set_random_seed`, `clear_session` or a change of strategy."""
        generator = keras_internals.global_generator()
        if not isinstance(generator, cls) or generator._strategy is not strategy:
            generator = cls(strategy)
            generator.install()
        return generator

    def install(self) -> None:
        """Makes this the generator of the current thread."""
        keras_internals.set_global_generator(self)

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns the next seed, which differs between replicas."""
        if tf.distribute.get_strategy() is not self._strategy or tf.distribute.in_cross_replica_context():
            if self._own is None:
                self._own = run_in_clean_thread(keras.random.SeedGenerator)
            return self._own.next(ordered)
        return self.generator(makes=True).next(ordered)

    def generator(self, makes: bool) -> Any:
        """Returns the replicas' seed generator. Before the first draw, creates it if `makes`, else returns None."""
        if self._shared is None and makes:
            self._shared = run_in_clean_thread(self._make)
        return self._shared

    def _make(self) -> keras.random.SeedGenerator:
        with self._strategy.scope():
            return keras.random.SeedGenerator()


def global_seed(strategy: tf.distribute.Strategy, makes: bool = False) -> tf.Variable | None:
    """Returns the state from which `keras.random.*` draws without a seed in this thread. If it does not exist, creates it if `makes`, else returns None."""
    generator = keras_internals.global_generator()
    if strategy.num_replicas_in_sync > 1:
        if makes or isinstance(generator, GlobalSeedGenerator):
            generator = GlobalSeedGenerator.for_current_thread(strategy).generator(makes)
    elif generator is None and makes:
        generator = keras.random.SeedGenerator()
        keras_internals.set_global_generator(generator)
    return generator.state.value if isinstance(generator, keras.random.SeedGenerator) else None


class StepSeedGenerator:
    """A replacement of the global generator in a parameter-server step, which any worker may run or repeat.

    `seed` is the seed of all steps; None means that the first draw chooses a random seed.
    """

    def __init__(self, step: tf.Tensor, seed: int | None = None):
        self._step = tf.cast(step, tf.int64)
        self._seed = seed
        self._draws = 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns a seed that depends on the step and on the number of earlier draws in it."""
        if self._seed is None:
            self._seed = random.randint(1, int(1e9))  # as Keras does
        self._draws += 1
        return tf.stack([self._seed + self._step * SEED_STRIDE, tf.constant(self._draws, tf.int64)])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Makes this the generator of the current thread within the context."""
        before = keras_internals.global_generator()
        keras_internals.set_global_generator(self)
        try:
            yield
        finally:
            keras_internals.set_global_generator(before)


class UpdateSeeds:
    """Random numbers of an optimizer's update that are equal on all replicas.

    TensorFlow updates the copies of a variable in turn: the first copy draws its seeds, and the others get the same ones.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        self._draws = 0  # the number of random operations before the first copy's update
        self._seeds: list[tf.Tensor] = []  # of the first copy

    @contextlib.contextmanager
    def equal(self, variable: tf.Variable) -> Iterator[None]:
        """Makes the update of a copy draw the seeds of the first copy. Does nothing with one replica, or if copies are not updated in turn."""
        strategy = tf.distribute.get_strategy()
        copy = tf_internals.get_update_replica_id()
        if not isinstance(copy, int) or tf_internals.num_replicas(strategy) == 1:
            yield
            return
        holder = tf_internals.seed_holder()
        seed = tf_internals.get_seed(holder)
        if copy == 0:
            self._draws = tf_internals.get_draws(holder)
            self._seeds = []
        known = iter([*self._seeds])

        def draw(own: Callable[[], tf.Tensor], shift: int, ordered: bool = True) -> tf.Tensor:
            if copy:
                return next(known)
            drawn = own()  # in order, because other orders mix the seed with the replica's number
            self._seeds.append(drawn - tf.stack([tf.constant(shift, drawn.dtype), 0]))
            return self._seeds[-1]

        everywhere = tf_internals.global_seed()
        of_variable = None
        if everywhere is not None:
            tf_internals.set_seed(holder, (everywhere - SEED_STRIDE) % (2**31 - 1))
            of_variable = everywhere + zlib.crc32(variable.name.encode())
        tf_internals.set_draws(holder, self._draws)
        unnamed: Any = StepSeedGenerator(self._optimizer.iterations, of_variable)
        own = [value for value in vars(self._optimizer).values() if isinstance(value, keras.random.SeedGenerator)]
        # Outside of replicas a state reads as that of this process's first replica.
        shift = strategy.local_replicas[0] * SEED_STRIDE
        for generator in own:
            generator.next = functools.partial(draw, generator.next, shift)
        unnamed.next = functools.partial(draw, unnamed.next, 0)
        try:
            with unnamed.installed():
                yield
        finally:
            for generator in own:
                del generator.next
            tf_internals.set_seed(holder, seed)


def use_entropy_per_worker() -> None:
    """Makes each worker that runs the traced graph draw from its system's entropy, even if a seed is set."""
    tf_internals.set_seed(tf.compat.v1.get_default_graph(), None)


def assign_seed(components: Sequence[tf.Variable], replicas: Sequence[int], value: Structure) -> None:
    """Assigns a seed generator's state, `[seed, counter]`, outside of replicas, and keeps the replicas' seeds different.

    Outside of a replica a state reads as the state of this process's first replica. If `value` has that seed, all replicas keep their
    seeds. Any other seed becomes that of replica 0; replica r adds `r * SEED_STRIDE`. `replicas` has the replica number of each component.
    """
    value = tf.cast(value, components[0].dtype)
    stride = tf.constant(SEED_STRIDE, value.dtype)
    is_unchanged = tf.cast(value[0] == components[0].read_value()[0], value.dtype)
    first = value[0] - is_unchanged * replicas[0] * stride
    for replica, component in zip(replicas, components, strict=True):
        component.assign(tf.stack([first + replica * stride, value[1]]))


def run_in_clean_thread(function: Callable[[], Any]) -> Any:
    """Calls `function` in a new thread, in which no graph is traced and no scope is entered."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
