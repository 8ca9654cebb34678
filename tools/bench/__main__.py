"""Runs benchmarks and writes `RESULTS.md`.

    python -m tools.bench all
    python -m tools.bench link --only model=mlp,workers=2 --rounds 3
    python -m tools.bench report

What is measured is kept as JSON lines in `results/`, and those of a case that is measured anew are replaced.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

from tools import netlab
from tools.bench import record, report
from tools.bench.frame import TaskFailed


def main() -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=[*report.BENCHES, "all", "report"])
    parser.add_argument("--only", default="", help="cases to run, as model=mlp,workers=2; empty means all")
    parser.add_argument("--contenders", default="", help="between commas; empty means all; must have the baseline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=report.FOLDER, help="the folder of RESULTS.md and results/")
    args = parser.parse_args()
    if bad := [each for each in args.only.split(",") if each and "=" not in each]:
        parser.error(f"--only wants name=value. Received: {', '.join(map(repr, bad))}.")
    wanted = dict(each.split("=", 1) for each in args.only.split(",") if each)
    names = report.BENCHES if args.bench == "all" else (args.bench,) if args.bench in report.BENCHES else ()
    benches = {name: importlib.import_module(f"tools.bench.{name}") for name in names}
    cases = {name: [case for case in bench.CASES if fits(case, wanted)] for name, bench in benches.items()}
    if names and not any(cases.values()):
        known = dict.fromkeys(
            f"{key}={value}" for bench in benches.values() for c in bench.CASES for key, value in c.items()
        )
        parser.error(f"--only={args.only} fits no case. There are {', '.join(known)}.")
    failed = 0
    try:
        for name, bench in benches.items():
            lacks = getattr(bench, "missing", str)()
            if reason := lacks or (netlab.missing() if getattr(bench, "NEEDS_LAB", False) else ""):
                print(f"{name} is left out: {reason}", flush=True)
                continue
            for case in cases[name]:
                try:
                    found = bench.run(case, args.rounds, [each for each in args.contenders.split(",") if each])
                except TaskFailed as e:  # the others go on, for hours
                    print(f"{name} {case}: {e}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                if found is None:  # it has said why
                    continue
                record.write(args.out / "results" / f"{name}.jsonl", [found])
                print(report.table(found, args.out), flush=True)
    finally:  # what there is by now
        report.write(args.out)
    return 1 if failed else 0


def fits(case: dict[str, object], wanted: dict[str, str]) -> bool:
    """Whether a case has all the values that are wanted."""
    return all(str(case.get(key)) == value for key, value in wanted.items())


if __name__ == "__main__":
    sys.exit(main())
