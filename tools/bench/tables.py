"""The step of a model with a large embedding table, in ms, against that with a table of 1,000 rows.

16 columns; a batch has 64 examples of 8 ids, drawn from all rows. Without tfdist Keras updates the whole table; under tfdist the rows
of the batch are updated (`row_updates="lazy"`; exact for Adagrad, and LazyAdam's arithmetic for Adam).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record

SMALL = 1_000
SYSTEMS = ("Keras", "tfdist")
CASES = [
    {"optimizer": optimizer, "rows": rows} for rows in (1_000_000, 10_000_000) for optimizer in ("adagrad", "adam")
]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the median ms of a step for each system and table."""
    contenders = []
    against = {}
    for system in SYSTEMS:
        if names and system not in names:
            continue
        small = f"{system}, {SMALL:,} rows"
        large = f"{system}, {case['rows']:,} rows"
        contenders += [(small, system, SMALL), (large, system, case["rows"])]
        against[large] = small
    found = run_cluster("tools.bench.tables_program", {**case, "rounds": rounds, "contenders": contenders}, 1)
    return Record("tables", case, "ms", found["samples"], against)
