"""What compressors compute, in ns per number on all cores, without a network.

One rank's part of an exchange with nobody else: rounding, packing, unpacking, error feedback. "pass" reads all numbers and writes
as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.compressors import COMPRESSORS
from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, against

CASES = [{"model": model} for model in ("resnet50", "transformer")]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ns per number."""
    options = {**case, "rounds": rounds, "contenders": list(names or COMPRESSORS)}
    samples = run_cluster("tools.bench.codec_program", options, 1)["ns"]
    return Record("codec", case, "ns", samples, against("pass", samples))
