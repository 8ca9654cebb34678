"""Seconds from `python -m tfdist.train` to the end of the first step: `python -m tools.bench.start`.

On 1, 2 and 4 tasks of this machine, in parts, of the task that came last: when it asks for the others, all of them are there.
What is between the parts (reading the configuration, building model and data) is in "all" alone. Medians (least to most).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

from tfdist.cluster import local_cluster
from tfdist.launcher import Launcher

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ("imports", "preflight", "server start", "tracing and first step", "all")


def main() -> int:
    """Runs the measurement and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for tasks in map(int, args.tasks.split(",")):
        found = [run(tasks) for _ in range(args.rounds)]
        print(f"{tasks} tasks:")
        for part in PARTS:
            seconds = [each[part] for each in found]
            print(
                f"  {part:24s} {statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})",
                flush=True,
            )
    return 0


def run(tasks: int) -> dict[str, float]:
    """Returns the seconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tools.bench.start_program", folder, str(tasks)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        environ.pop("TF_CONFIG", None)
        if code := Launcher(program, local_cluster(tasks), pathlib.Path(folder, "logs"), environ).run():
            sys.exit(code)
        found = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("start*.json")]
        return min(found, key=lambda each: each["preflight"])


if __name__ == "__main__":
    sys.exit(main())
