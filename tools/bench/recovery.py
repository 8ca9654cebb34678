"""What backups cost, and how long a restart takes: `python -m tools.bench.recovery`.

Overhead: step time of `fit` with a backup every few steps over that without any, in turn in the same processes of a local
cluster, on an MLP of 10.5 million parameters with Adam (126 MB of state). Means over the steps of a round, as a backup
falls on few of them.
Recovery: from `kill -9` of one of two workers to the end of the first new step, split into its parts; medians (least to most).
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
# Parts of a recovery: name, and the moments between which it lies.
PARTS = {
    "detection": ("killed", "lost"),
    "process start": ("lost", "started"),
    "imports": ("started", "imported"),
    "cluster start": ("imported", "connected"),
    "model": ("connected", "built"),
    "data and symbolic build": ("built", "begun"),
    "restore": ("begun", "restored"),
    "tracing and first step": ("restored", "stepped"),
}
UNAVOIDABLE = ("imports", "tracing and first step")


def main() -> int:
    """Runs both measurements and prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round of the overhead")
    parser.add_argument("--save_freq", type=int, default=10)
    parser.add_argument("--what", default="overhead,recovery")
    args = parser.parse_args()
    what = args.what.split(",")
    if "overhead" in what:
        print(report_overhead(run("overhead", args.workers, args.rounds, args.steps, args.save_freq)), flush=True)
    if "recovery" in what:
        print(report_recovery([run("recovery", args.workers, 1, 40, 10) for _ in range(args.rounds)]), flush=True)
    return 0


def run(mode: str, workers: int, rounds: int, steps: int, save_freq: int) -> Any:
    """Returns what the chief of a cluster has measured."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tools.bench.recovery_program", mode, folder, str(rounds), str(steps)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("TF_CONFIG", None)
        logs = pathlib.Path(folder, "logs")
        launcher = Launcher([*program, str(save_freq)], local_cluster(workers), logs, environ, max_restarts=1)
        if code := launcher.run():
            sys.exit(code)
        results = json.loads(pathlib.Path(folder, "results.json").read_text())
        return results if mode == "overhead" else {"lost": launcher.lost_at, **results}


def report_overhead(result: dict[str, list[float]]) -> str:
    """Returns the table of the overhead."""
    ratios = [mine / plain for mine, plain in zip(result["backups"], result["none"], strict=True)]
    lines = [f"  {name:10s} {statistics.median(seconds) * 1000:8.1f} ms a step" for name, seconds in result.items()]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    return "\n".join(["overhead of backups:", *lines, f"  with / without: {spread}"])


def report_recovery(results: list[dict[str, float]]) -> str:
    """Returns the table of the recovery."""
    lines = ["from kill -9 to the first new step:"]
    for name, (begin, end) in PARTS.items():
        lines.append(f"  {name:26s} {_spread([result[end] - result[begin] for result in results])}")
    rest = [
        result["stepped"]
        - result["killed"]
        - sum(result[PARTS[part][1]] - result[PARTS[part][0]] for part in UNAVOIDABLE)
        for result in results
    ]
    lines.append(f"  {'all':26s} {_spread([result['stepped'] - result['killed'] for result in results])}")
    lines.append(f"  {'all but imports, tracing':26s} {_spread(rest)}")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
