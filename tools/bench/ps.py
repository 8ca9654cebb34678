"""Steps per second of the Trainer's fit under parameter servers, against a hand-written loop and tf_keras' fit.

    python -m tools.bench.ps

The loop is that of TensorFlow's tutorial: `ClusterCoordinator.schedule` for each step, then `join`. All three run in turn
in one local cluster for each number of workers, several rounds. Printed are steps per second, medians over the rounds,
and the ratios of the rounds: median (least to most).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from tfdist.cluster import local_cluster
from tfdist.launcher import Launcher

ROOT = pathlib.Path(__file__).parents[2]


def main() -> int:
    """Runs the clusters and prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="steps of each contender in a round")
    parser.add_argument("--models", default="digits,mlp", help="of digits and mlp")
    parser.add_argument("--output", help="append each result as a JSON line to this file")
    args = parser.parse_args()
    for model in args.models.split(","):
        for workers in map(int, args.workers.split(",")):
            result = measure(model, workers, args.ps, args.rounds, args.steps)
            print(report(result), flush=True)
            if args.output:
                with open(args.output, "a") as file:
                    file.write(json.dumps(result) + "\n")
    return 0


def measure(model: str, workers: int, ps: int, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the steps per second of each contender: name to one figure for each round.

    Raises:
        SystemExit: A task has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        program = [sys.executable, "-m", "tools.bench.ps_program", model, str(rounds), str(steps), str(results)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("TF_CONFIG", None)
        if code := Launcher(program, local_cluster(workers, ps), pathlib.Path(folder, "logs"), environ).run():
            sys.exit(code)
        return json.loads(results.read_text())


def report(result: dict[str, Any]) -> str:
    """Returns a result as text: steps per second, and the Trainer's ratio to each other contender."""
    rates = result["steps_per_second"]
    lines = [f"{result['model']}, {result['workers']} workers, {result['ps']} ps:"]
    for name, rounds in rates.items():
        text = f"  {name:10s} {statistics.median(rounds):8.1f} steps/s"
        if name != "trainer":
            ratios = [mine / theirs for mine, theirs in zip(rates["trainer"], rounds, strict=True)]
            text += f"   trainer / it: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
