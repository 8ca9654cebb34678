"""Steps to a target accuracy of each compressor, and the time that they take on a slow link.

Steps: the digits network (convolutions, dropout), two replicas, SGD with momentum, until 97 % of the test images are classified
rightly; for each compressor the learning rate of the same four that needs the fewest steps (median of three seeds). Time: these
steps by the median step of the 10.5 million parameter MLP with two workers at 100 Mbit/s, as `link` has measured it. Check: the
digits network trained from start to target at 100 Mbit/s, and its steps by its own median step, in seconds (medians of the same
seeds).
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, read

NEEDS_LAB = True
NAMES = ("none", "bf16", "fp16", "int8", "int8 sum", "powersgd", "topk")
RATES = (0.02, 0.05, 0.1, 0.2)
SEEDS = 3
STEPS = 200
CASES = [{"model": "digits", "target": "0.97", "workers": 2, "rate": "100mbit"}]
LINK = {"model": "mlp", "workers": 2, "rate": "100mbit"}  # the case of `link` whose steps are counted


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the steps of each compressor, a sample for each seed."""
    chosen = list(names or NAMES)
    options = {"target": float(case["target"]), "steps": STEPS, "replicas": case["workers"]}
    runs = [[name, rate, seed] for name in chosen for rate in RATES for seed in range(SEEDS)]
    found = run_cluster("tools.bench.accuracy_program", {**options, "runs": runs}, 1)["runs"]
    samples, best = {}, {}
    for name in chosen:
        by_rate = {rate: [each for each in found if each["name"] == name and each["rate"] == rate] for rate in RATES}
        best[name] = min(RATES, key=lambda rate: statistics.median(each["steps"] for each in by_rate[rate]))
        samples[name] = [each["steps"] for each in by_rate[best[name]]]
    finals = {
        name: statistics.mean(e["accuracy"] for e in found if e["name"] == name and e["rate"] == best[name])
        for name in chosen
    }
    runs = [[name, best[name], seed] for name in chosen for seed in range(SEEDS)]
    options |= {"stop": True}
    real = run_cluster("tools.bench.accuracy_program", {**options, "runs": runs}, case["workers"], rate=case["rate"])
    checks = {name: [each for each in real["runs"] if each["name"] == name] for name in chosen}
    whole = {name: [sum(each["seconds"]) for each in mine] for name, mine in checks.items()}
    columns = {
        "learning rate": best,
        "accuracy at the end": finals,
        "check: start to target, s": {name: statistics.median(values) for name, values in whole.items()},
        "at most": {name: max(values) for name, values in whole.items()},
        "check: steps by step, s": {
            name: statistics.median(each["steps"] * each["step_seconds"] for each in mine)
            for name, mine in checks.items()
        },
    }
    note = f"At most {STEPS} steps"
    if missed := {each["name"] for each in found if each["rate"] == best[each["name"]] and not each["reached"]}:
        note += f"; the target was not reached in them in every run of {', '.join(sorted(missed))}"
    return Record("accuracy", case, "steps", samples, columns=columns, note=note + ".")


def derived(record: Record, results: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns the columns that also need what `link` has measured: none where it has not.

    Args:
        record: Of this benchmark.
        results: The folder of all benchmarks' samples.
    """
    path = results / "link.jsonl"
    steps = next((found.samples for found in read(path) if found.case == LINK), {}) if path.exists() else {}
    medians = {name: statistics.median(steps[name]) for name in record.samples if name in steps}
    seconds = {name: statistics.median(record.samples[name]) * each / 1000 for name, each in medians.items()}
    return {"MLP's step, ms": medians, "time to accuracy, s": seconds} if medians else {}
