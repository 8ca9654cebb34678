"""Runs the schedules of some seeds, and says of each how its job ended.

python -m tests.chaos.program 12 13           # or 0-83, which has every fault at every phase of every kind of cluster
python -m tests.chaos.program --minutes=20 100      # seeds from 100 on, until the time is over

It prints a line of JSON for each seed: `seed`, `seconds`, the `schedule`, its `end` (`bits`, `steps` or `sentence`), the sentence, and what was
wrong, of which there should be nothing; in the end, how many ran. `--keep=FOLDER` keeps what the jobs of failed seeds have written.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.chaos import faults, schedules, verdict


def main(arguments: Sequence[str]) -> int:
    """Runs the seeds that the arguments name; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("seeds", nargs="*", default=["0"])
    given = parser.parse_args(arguments)
    seeds: list[int] = []
    for first, dash, last in (each.partition("-") for each in given.seeds):
        seeds += range(int(first), int(last) + 1 if dash else int(first) + (100_000 if given.minutes else 1))
    ends = time.monotonic() + 60 * (given.minutes or 1e9)
    counts: collections.Counter[str] = collections.Counter()
    references: verdict.References = {}
    for seed in seeds:
        if time.monotonic() > ends:
            break
        schedule = schedules.draw(seed)
        if schedule.needs_root and (reason := faults.missing()):
            print(json.dumps({"seed": seed, "schedule": str(schedule), "skipped": reason}), flush=True)
            continue
        folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
        result = verdict.run(schedule, folder, references)
        print(json.dumps(result), flush=True)
        counts["wrong" if result["wrong"] else result["end"]] += 1
        if result["wrong"] and given.keep:
            shutil.copytree(folder, given.keep / str(seed), dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(counts.values())} schedules ran: {dict(counts)}", flush=True)
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
