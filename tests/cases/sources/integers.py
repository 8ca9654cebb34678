"""Metrics that count in integers."""

import keras
import numpy as np
from keras import ops

from tests.cases.arms import ALL
from tests.cases.case import case
from tests.cases.sources.metrics import identity
from tfdist.compat import keras_metrics

X = np.arange(5, dtype="float32")[:, None]


class Counted(keras.metrics.Metric):
    """Counts from 1: steps, and examples if the class declares that it sums them."""

    def __init__(self):
        super().__init__(name=type(self).__name__)
        self.counted = self.add_variable((), keras.initializers.Constant(1), dtype="int32")
        self.pair = self.add_variable((2,), keras.initializers.Constant(1), dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        examples = ops.shape(y_true)[0] if getattr(self, "sums_examples", False) else 1
        self.counted.assign_add(examples)
        self.pair.assign_add(ops.cast([examples, 0], "int64"))

    def reset_state(self):
        self.counted.assign(1)
        self.pair.assign([5, 7])

    def result(self):
        numbers = {"counted": self.counted, "first": self.pair[0], "second": self.pair[1]}
        return {f"{self.name} {name}": number for name, number in numbers.items()}


class Summed(Counted):
    sums_examples = True


@case(*ALL)
def integers_that_do_not_begin_at_zero(world):
    model = identity(world, metrics=[Counted, Summed])
    right = {}
    for kind, added in ((Counted, 2), (Summed, 5)):
        numbers = {"counted": 1 + added, "first": 5 + added, "second": 7}
        right |= {f"{kind.__name__} {name}": number for name, number in numbers.items()}
    pairs = {}
    for epochs in (1, 2):
        logs = model.fit(X, X, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history
        pairs[f"fit {epochs}"] = {name: logs[name][-1] for name in right}, right
    evaluated = model.evaluate(X, X, batch_size=4, verbose=0, return_dict=True)
    pairs["evaluated"] = {name: evaluated[name] for name in right}, right
    for metric in keras_metrics.compiled_metrics(model).metrics:
        metric.counted.assign(9)
        pairs[f"{metric.name} assigned"] = metric.counted.numpy(), 9
    return pairs
