"""How fast data reach a small model, in µs an example: what tfdist reads, against `tf.data` pipelines written by hand.

20,000 images of 64 x 64 x 3 bytes, and the same as a `PyDataset` whose items take 5 ms each. `fit` trains a dense layer on the
images' means, so that almost all time is that of the data. Files are in the page cache, and each round is an epoch of `fit`, whose
order is shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record

# Each contender, and what it is compared with.
CONTENDERS = {
    "memory map": {"tf.data, memory map": "", "arrays_from": "tf.data, memory map"},
    "TFRecord": {"tf.data, TFRecord": "", "records_from": "tf.data, TFRecord"},
    "rows": {
        "arrays_from": "",
        **{
            f"rows_from, {source}": "arrays_from"
            for source in ("memory maps", "object", "datasets", "datasets.shuffle()", "HDF5", "HDF5 in chunks", "grain")
        },
    },
    "PyDataset": {
        "tf.data, from_generator": "",
        "PyDataset": "tf.data, from_generator",
        "shard='items'": "tf.data, from_generator",
    },
}
CASES = [{"data": data, "workers": 2 if data == "PyDataset" else 1} for data in CONTENDERS]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the µs that an example takes, and as a column the ms that a step has waited for its batch."""
    contenders = {name: other for name, other in CONTENDERS[case["data"]].items() if not names or name in names}
    options = {**case, "rounds": rounds, "contenders": list(contenders)}
    found = run_cluster("tools.bench.inputs_program", options, case["workers"])
    against = {name: other for name, other in contenders.items() if other in contenders}
    columns = {"input_wait_ms": found["waits"]}
    return Record("inputs", case, "µs/example", found["samples"], against, columns)
