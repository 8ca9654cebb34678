"""Step time of the Trainer's fit against a hand-written loop and against tf_keras' fit: `python -m tools.bench.step`.

All three run in turn in the same processes of one local cluster, several rounds, so that what else the machine does
falls on each alike. Printed are medians over the steps of a round, and the ratios of the rounds: median (least to most).
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
CONTENDERS = ("trainer", "loop", "loop of executions", "tf_keras")


def main() -> int:
    """Runs the cluster and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, default=2, help="tasks, each on a core of its own where there are enough"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=64, help="steps of each contender in a round, a multiple of 16")
    parser.add_argument("--models", default="mlp,digits", help="of mlp and digits")
    parser.add_argument("--executions", default="1,16", help="values of steps_per_execution")
    parser.add_argument("--output", help="append each result as a JSON line to this file")
    args = parser.parse_args()
    for model in args.models.split(","):
        for execution in map(int, args.executions.split(",")):
            result = measure(args.workers, model, execution, args.rounds, args.steps)
            print(report(result), flush=True)
            if args.output:
                with open(args.output, "a") as file:
                    file.write(json.dumps(result) + "\n")
    return 0


def measure(workers: int, model: str, execution: int, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the step seconds of each contender: name to `[rounds]` medians.

    Raises:
        SystemExit: A task has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        program = [sys.executable, "-m", "tools.bench.step_program", model, str(execution), str(rounds), str(steps)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("TF_CONFIG", None)
        launcher = Launcher([*program, str(results)], local_cluster(workers), pathlib.Path(folder, "logs"), environ)
        if code := launcher.run():
            sys.exit(code)
        return json.loads(results.read_text())


def report(result: dict[str, Any]) -> str:
    """Returns a result as text: step times, and the Trainer's ratio to each other contender."""
    seconds = result["seconds"]
    lines = [f"{result['model']}, {result['workers']} workers, steps_per_execution {result['steps_per_execution']}:"]
    for name, rounds in seconds.items():
        text = f"  {name:20s} {statistics.median(rounds) * 1000:8.2f} ms"
        if name != "trainer":
            ratios = [mine / theirs for mine, theirs in zip(seconds["trainer"], rounds, strict=True)]
            text += f"   trainer / it: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
