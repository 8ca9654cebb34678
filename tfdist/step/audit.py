"""The audit of a step: each worker computes the gradients of the next worker's examples, and all compare the checksums.

The step itself is not changed. An audited step runs in a function of its own, which also returns the checksum of the gradients before they are
reduced. Then a second function repeats the step up to its gradients. Reading a variable copies nothing, so all variables that this
function uses are kept from before the step, replaced for the repetition, and put back.
"""

from __future__ import annotations

import contextlib
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Gradient, Logs, Step, Structure
from tfdist.collectives.ranks import Ranks
from tfdist.compat.tf_internals import num_replicas
from tfdist.errors import AuditError
from tfdist.replicas import batch_splitting
from tfdist.runtime.log import logger
from tfdist.runtime.report.phase import phase
from tfdist.step import disputes
from tfdist.step.replica_step import ReplicaStep
from tfdist.strategy import Strategy

_EXCHANGES = ("Collective", "Nccl")  # how the types of operations begin that exchange values between workers
# Operations whose state no variable holds, so that no other worker can draw the same numbers.
_DRAWS = {
    *("Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle"),
    *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"),
}


class Audit:
    """The audits of a training: when they are due, their number, and the checksums of the running one.

    Attributes:
        ranks: The workers.
        done: The number of audits.
        position: The steps done before the next execution; None outside of a training.
        is_repeating: Whether a step is traced up to its gradients only.
        on_result: Called after each audit with its step and the fault, or an empty text.
    """

    def __init__(self, strategy: Strategy, ranks: Ranks, every: int):
        self._strategy = strategy
        self._every = every
        self._sums: dict[int, list[tf.Tensor]] | None = None  # by replica, while a function is traced
        self.ranks = ranks
        self.done = 0
        self.position: int | None = None
        self.is_repeating = False
        self.exchanges = False
        self.on_result: Callable[[int, str], None] = lambda step, text: None

    def is_due(self, steps: int) -> bool:
        """Returns whether an audit is due in the next execution of so many steps."""
        if not self._every or self.position is None:
            return False
        return self.position % self._every + steps >= self._every

    def stop(self, reason: str) -> None:
        """Ends all audits, with one warning of the chief."""
        self._every = 0
        step = (self.position or 0) + 1
        if self.ranks.is_chief:
            logger.warning(f"audit_every is off from step {step} on: {reason}")
        self.on_result(step, f"off: {reason}")

    @contextlib.contextmanager
    def collecting(self, repeats: bool) -> Iterator[Callable[[], tf.Tensor]]:
        """Collects checksums while a step is traced. Yields a function that returns those of this process's replicas, int64."""
        sums: dict[int, list[tf.Tensor]] = {replica: [] for replica in self._strategy.local_replicas}
        self._sums = sums
        self.is_repeating = repeats
        try:
            yield lambda: tf.stack(
                [each for replica in sorted(sums) for each in sums[replica]] or [tf.zeros([], tf.int64)]
            )
        finally:
            self._sums = None
            self.is_repeating = False

    def take(self, values: Sequence[Gradient]) -> bool:
        """Takes gradients, or a loss, of the replica that is being traced. Returns whether the step ends here, before the reduction."""
        context = tf.distribute.get_replica_context()
        if self._sums is None or context is None:
            return False
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        self._sums[replica] += [_checksum(value) for value in values if value is not None]
        operations = tf.compat.v1.get_default_graph().get_operations()
        self.exchanges |= self.is_repeating and any(operation.type.startswith(_EXCHANGES) for operation in operations)
        return self.is_repeating


def _checksum(value: Gradient) -> tf.Tensor:
    """Returns a sum over the bits of a tensor, each element multiplied by an odd number of its own. The order of such a sum is free."""
    if isinstance(value, tf.IndexedSlices):
        return _checksum(value.values) + 3 * _checksum(value.indices)
    bits = value
    if value.dtype.is_floating:
        kind = {2: tf.uint16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
        bits = tf.bitcast(value, kind)
    numbers = tf.cast(tf.reshape(bits, [-1]), tf.int64)
    return tf.reduce_sum(numbers * (2 * tf.range(tf.size(numbers, tf.int64)) + 1))


class AuditedStep:
    """A training step of one model that is audited.

    Args:
        audit: The audits of the training.
        model: The model.
        step: Its training step.
        run: Runs the step on a batch, and returns logs and flags.
    """

    def __init__(self, audit: Audit, model: keras.Model, step: Step, run: Callable[[Structure], Structure]):
        self._audit = audit
        self._ranks = audit.ranks
        self._strategy: Strategy = model.distribute_strategy
        self._model = model
        self._run = run
        # Not the replica step of the execution, which keeps what it has traced.
        self._replica = ReplicaStep(model, step)
        self._functions: dict[Any, tuple[Any, Any]] = {}  # by the form of the data
        self._variables: list[tf.Variable] = []  # components that the repetition uses

    def can_repeat(self, spec: Structure) -> bool:
        """Returns whether a step on data of this form can be repeated; otherwise ends all audits."""
        key = tuple(map(str, tf.nest.flatten(spec, expand_composites=True)))
        if key not in self._functions:
            with phase("step", "the tracing of an audit", True):
                reason = self._trace(key, spec)
            if reason:
                self._audit.stop(reason)
                return False
        self._step, self._repeat = self._functions[key]
        self._variables = self._components(self._repeat)
        return True

    def _trace(self, key: Any, spec: Structure) -> str:
        """Traces the functions for a form of data. Returns why the step cannot be repeated, or an empty text."""
        if self._model.run_eagerly or tf.config.functions_run_eagerly():
            return "run_eagerly=True runs no graph that another worker can repeat"
        if self._strategy.unlike_processors:
            return "the workers' processors differ, and round differently"
        repeat = tf.function(self._run_repeat, autograph=False).get_concrete_function(spec)
        if self._audit.exchanges:
            return (
                f"the step of {type(self._model).__name__} exchanges values between workers before its gradients (synchronized "
                "BatchNormalization, whole_batch, a table in shards), so that no worker can repeat another's part alone"
            )
        graph = repeat.graph.as_graph_def()
        nodes = [
            node for part in (graph.node, *(function.node_def for function in graph.library.function)) for node in part
        ]
        drawing = sorted({node.op for node in nodes} & _DRAWS)
        if drawing:
            return (
                f"the step of {type(self._model).__name__} draws numbers by tf.random ({', '.join(drawing)}), which no other worker can repeat; "
                "use keras.random with a keras.random.SeedGenerator"
            )
        self._functions[key] = tf.function(self._run_step, autograph=False).get_concrete_function(spec), repeat
        return ""

    def _run_step(self, data: Structure) -> Structure:
        with self._audit.collecting(repeats=False) as sums:
            return self._run(data), sums()

    def _run_repeat(self, data: Structure) -> tf.Tensor:
        totals = None
        if isinstance(data, batch_splitting.SplitBatch):
            totals = batch_splitting.count_examples(data, self._strategy)
        self._audit.exchanges = False
        with self._audit.collecting(repeats=True) as sums:
            self._strategy.run(self._replica, args=(data, totals))
            return sums()

    def _components(self, function: Any) -> list[tf.Variable]:
        found = {}
        for variable in function.variables:
            for component in self._strategy.experimental_local_results(variable):
                found[id(component)] = component
        return sorted(found.values(), key=lambda component: component.name)

    def __call__(self, data: Structure) -> tuple[Logs, Any]:
        """Runs the step on a batch, and audits it. Returns its logs and flags. A collective.

        Raises:
            AuditError: A host computes wrong.
        """
        before = [variable.read_value() for variable in self._variables]
        results, sums = self._step(data)
        # The last batches may have no example for a replica, which then begins with other statistics.
        if isinstance(data, batch_splitting.SplitBatch):
            totals = batch_splitting.count_examples(data, self._strategy)
            if int(totals[1]) < num_replicas(self._strategy):
                return results
        after = [variable.read_value() for variable in self._variables]
        try:
            self._compare(data, before, _digest(sums))
        finally:
            for variable, value in zip(self._variables, after, strict=True):
                variable.assign(value, read_value=False)
        return results

    def _compare(self, data: Structure, before: Sequence[tf.Tensor], own: int) -> None:
        audit = self._audit
        names = self._ranks.names
        step = (audit.position or 0) + 1

        def repeat(shift: int) -> int:
            return self._repeat_for(shift, data, before)

        checked = repeat(1)
        found = [disputes.Checksums(*row) for row in self._ranks.gather(own, checked).tolist()]
        audit.done += 1
        if not disputes.disputed(found):
            audit.on_result(step, "")
            return
        again = [own, checked, repeat(0), repeat(1)]
        if len(names) > 2:
            again.append(repeat(2))
        found = [disputes.Checksums(*row) for row in self._ranks.gather(*again).tolist()]
        wrong = disputes.culprits(found)
        if not wrong:
            audit.stop(
                f"the step of {type(self._model).__name__} computes other gradients when it is repeated. Does it draw numbers "
                "without a seed generator, or run on GPUs without tf.config.experimental.enable_op_determinism()?"
            )
            return
        hosts = self._ranks.gather_texts(platform.node())
        error = _error(wrong, names, hosts, step)
        audit.on_result(step, str(error))
        raise error

    def _repeat_for(self, shift: int, data: Structure, before: Sequence[tf.Tensor]) -> int:
        """Returns the checksum of the gradients of the rank that is `shift` ranks further, computed here."""
        tensors = tf.nest.flatten(data, expand_composites=True)
        own = [index for index, variable in enumerate(self._variables) if not variable.trainable]
        sent = [index for index, tensor in enumerate(tensors) if tensor.dtype != tf.variant]
        values = list(before)
        if shift:
            received = self._exchange(shift, [*(tensors[index] for index in sent), *(before[index] for index in own)])
            for index, tensor in zip(sent, received[: len(sent)], strict=True):
                tensors[index] = tensor
            for index, value in zip(own, received[len(sent) :], strict=True):
                values[index] = value
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value, read_value=False)
        return _digest(self._repeat(tf.nest.pack_sequence_as(data, tensors, expand_composites=True)))

    def _exchange(self, shift: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the rank that is `shift` ranks further."""
        packed = tf.io.serialize_tensor(tf.stack([tf.io.serialize_tensor(tensor) for tensor in tensors])).numpy()
        source = (self._ranks.rank + shift) % self._ranks.size
        received = self._ranks.receive(source, np.frombuffer(packed, np.uint8))
        parts = tf.io.parse_tensor(received.tobytes(), tf.string).numpy()
        return [tf.io.parse_tensor(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def _digest(sums: tf.Tensor) -> int:
    """Returns a number that the ranks exchange as float64."""
    return zlib.crc32(sums.numpy().tobytes())


def _error(wrong: Sequence[int], names: Sequence[str], hosts: Sequence[str], step: int) -> AuditError:
    shown = [f"{names[rank]} on host {hosts[rank]}" for rank in wrong]
    if len(wrong) == 2:
        return AuditError(
            f"{' and '.join(shown)} computed different gradients from the same examples at step {step}, and again when they repeated it: "
            "one of the hosts computes wrong; replace both, or train with three workers, which name it"
        )
    others = [name for rank, name in enumerate(names) if rank not in wrong]
    if len(names) == 2:
        return AuditError(
            f"{shown[0]} computed wrong gradients at step {step}: it computed others when it repeated the step, and "
            f"{others[0]} agrees with these; remove the host"
        )
    neighbours = sorted({(wrong[0] + shift) % len(names) for shift in (-1, 1)})
    witnesses = " and ".join(names[rank] for rank in neighbours)
    return AuditError(
        f"{shown[0]} computed wrong gradients at step {step}: {witnesses} agree against it; remove the host"
    )
