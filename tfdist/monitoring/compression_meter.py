"""How much smaller compression makes gradients, and how much of them it has left for later steps."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.compat import optimizer_search, tf_internals
from tfdist.gradients.optimizer import get_reduction
from tfdist.gradients.reduction import Reduction
from tfdist.monitoring import compression_report
from tfdist.monitoring.meter import Meter

_RESIDUAL = "residual"  # the state of `ErrorFeedback`


class CompressionMeter(Meter):
    """Reads the compressor of a model's optimizers; without one nothing.

    The norm is that of the errors that this process feeds back, over all its replicas.
    """

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        self._optimizers: list[keras.optimizers.Optimizer] | None = None
        self._planned: float | None = None
        self._is_planned = False

    def read(self) -> dict[str, float | None]:
        if self._optimizers is None:  # the search takes a millisecond and more
            self._optimizers = optimizer_search.optimizers(self.model)
        found = [(each, of) for each in self._optimizers if (of := get_reduction(each))]
        if not found:
            return {}
        optimizer, reduction = found[0]  # the Trainer gives all optimizers the same compressor
        has_begun = int(optimizer.iterations.numpy()) > reduction.compressor.start_step
        ratio = self._planned_ratio(reduction) if has_begun else 1.0
        return {"comm/compression_ratio": ratio, "comm/residual_norm": self._residual_norm([of for _, of in found])}

    def _planned_ratio(self, reduction: Reduction) -> float | None:
        if not self._is_planned:
            replicas = tf_internals.num_replicas(self.model.distribute_strategy)
            plain = compression_report.planned_bytes(self.model, None, replicas)
            compressed = compression_report.planned_bytes(self.model, reduction.compressor, replicas)
            self._is_planned, self._planned = True, plain / compressed if plain and compressed else None
        return self._planned

    def _residual_norm(self, reductions: list[Reduction]) -> float | None:
        local = self.model.distribute_strategy.experimental_local_results
        residuals = [
            component.read_value()
            for reduction in reductions
            for specs, states in zip(reduction.slots, reduction.states, strict=True)
            for spec, state in zip(specs, states, strict=True)
            if spec.name == _RESIDUAL
            for component in local(state)  # to read the variable itself would be a collective
        ]
        return float(tf.linalg.global_norm(residuals)) if residuals else None
