"""Writes the table of metrics in docs/keras-support.md: how replicas compute each class of `keras.metrics`.

    python -m tools.site.metrics

The table comes from `tfdist.step.metrics.kind`; tests/cases/sources/metrics.py compares each class with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras

from tfdist.step.metrics import kind

PAGE = Path(__file__).parents[2] / "docs" / "keras-support.md"
BEGIN = "<!-- written by: python -m tools.site.metrics -->\n\n"
END = "\n<!-- end -->\n"

Make = Callable[[], keras.metrics.Metric]
_NAMES = {
    # what the metrics of a row compare: numbers, probabilities of one class, one-hot classes, labels, or values alone
    "numbers": """CosineSimilarity ConcordanceCorrelation LogCoshError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
        MeanSquaredLogarithmicError PearsonCorrelation Poisson R2Score RootMeanSquaredError""",
    "binary": """AUC Accuracy BinaryAccuracy BinaryCrossentropy FalseNegatives FalsePositives Hinge Precision Recall SquaredHinge
        TrueNegatives TruePositives""",
    "classes": "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge F1Score FBetaScore KLDivergence",
    "labels": "SparseCategoricalAccuracy SparseCategoricalCrossentropy",
    "values": "Mean Sum",
}
# Classes with arguments, and arguments for which a metric depends on the other examples of a batch.
_OTHERS: dict[str, dict[str, Make]] = {
    "numbers": {
        "ConcordanceCorrelation(axis=0)": lambda: keras.metrics.ConcordanceCorrelation(axis=0),
        "CosineSimilarity(axis=0)": lambda: keras.metrics.CosineSimilarity(axis=0),
        "MeanMetricWrapper": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
        "MeanMetricWrapper(keras.losses.dice)": lambda: keras.metrics.MeanMetricWrapper(keras.losses.dice),
        "PearsonCorrelation(axis=0)": lambda: keras.metrics.PearsonCorrelation(axis=0),
    },
    "binary": {
        "BinaryIoU": lambda: keras.metrics.BinaryIoU(),
        "PrecisionAtRecall": lambda: keras.metrics.PrecisionAtRecall(0.5),
        "RecallAtPrecision": lambda: keras.metrics.RecallAtPrecision(0.5),
        "SensitivityAtSpecificity": lambda: keras.metrics.SensitivityAtSpecificity(0.5),
        "SpecificityAtSensitivity": lambda: keras.metrics.SpecificityAtSensitivity(0.5),
    },
    "classes": {
        "OneHotIoU": lambda: keras.metrics.OneHotIoU(3, [0, 2]),
        "OneHotMeanIoU": lambda: keras.metrics.OneHotMeanIoU(3),
        "TopKCategoricalAccuracy": lambda: keras.metrics.TopKCategoricalAccuracy(2),
    },
    "labels": {
        "IoU": lambda: keras.metrics.IoU(3, [0, 1], sparse_y_pred=False),
        "MeanIoU": lambda: keras.metrics.MeanIoU(3, sparse_y_pred=False),
        "SparseTopKCategoricalAccuracy": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
    },
}
EXAMPLES: dict[str, dict[str, Make]] = {
    data: dict(
        sorted({**{name: getattr(keras.metrics, name) for name in names.split()}, **_OTHERS.get(data, {})}.items())
    )
    for data, names in _NAMES.items()
}

_WAYS = {
    "examples": "each replica counts its own examples, and the counts are added up",
    "mean": "each replica computes it of the whole batch",
    "state": "each replica updates it with the whole batch",
}
_OF_SERVERS = "right: a step has the whole batch"


def table() -> str:
    """Returns the table, with its markers."""
    known = {name: make() for of_data in EXAMPLES.values() for name, make in of_data.items()}
    rows = [("metric", "with several replicas", "under parameter servers"), ("---",) * 3]
    for way, text in _WAYS.items():
        names = [f"`{name}`" for name, metric in sorted(known.items()) if kind(metric) == way]
        if names:
            rows.append((", ".join(names), text, "right"))
    rows += [
        ("a function that returns one value for each example", _WAYS["examples"], "right"),
        ("a function that returns one number for a batch, a loss object", _WAYS["mean"], _OF_SERVERS),
        (
            "a class with an `update_state` of your own: a maximum, a median, a mean over batches",
            _WAYS["state"],
            "right if it adds to its variables; otherwise one warning names it",
        ),
        ("the same with `sums_examples = True` in the class", _WAYS["examples"], "right"),
    ]
    return BEGIN + "".join(f"| {' | '.join(row)} |\n" for row in rows) + END


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table() + after)


if __name__ == "__main__":
    main()
