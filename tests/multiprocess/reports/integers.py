"""Metrics that count in integers."""

import keras
import numpy as np
from keras import ops

from tests.multiprocess.reports.cases import ALL, case
from tests.multiprocess.reports.metrics import identity
from tfdist.compat import keras_metrics

X = np.arange(5, dtype="float32")[:, None]


class Counted(keras.metrics.Metric):
    """Counts from 1: steps, and examples if the class declares that it sums them."""

    def __init__(self, name="counted"):
        super().__init__(name=name)
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
        return {"counted": self.counted, "first": self.pair[0], "second": self.pair[1]}


class Summed(Counted):
    sums_examples = True


@case(*ALL)
def integers_that_do_not_begin_at_zero(world):
    pairs = {}
    for kind, added in ((Counted, 2), (Summed, 5)):
        model = identity(world, metrics=[kind])
        right = [1 + added, 5 + added, 7]
        for epochs in (1, 2):
            logs = model.fit(X, X, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history
            found = [logs[name][-1] for name in ("counted", "first", "second")]
            pairs[f"{kind.__name__} {epochs}"] = found, right
        evaluated = model.evaluate(X, X, batch_size=4, verbose=0, return_dict=True)
        pairs[f"{kind.__name__} evaluated"] = [evaluated[name] for name in ("counted", "first", "second")], right
        metric = keras_metrics.compiled_metrics(model).metrics[0]
        metric.counted.assign(9)
        pairs[f"{kind.__name__} assigned"] = metric.counted.numpy(), 9
    return pairs
