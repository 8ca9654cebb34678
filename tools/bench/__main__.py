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


def main() -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=[*report.BENCHES, "all", "report"])
    parser.add_argument("--only", default="", help="cases to run, as model=mlp,workers=2; empty means all")
    parser.add_argument("--contenders", default="", help="between commas; empty means all; must have the baseline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=report.FOLDER, help="the folder of RESULTS.md and results/")
    args = parser.parse_args()
    wanted = dict(each.split("=", 1) for each in args.only.split(",") if each)
    names = report.BENCHES if args.bench == "all" else (args.bench,) if args.bench in report.BENCHES else ()
    try:
        for name in names:
            run(name, wanted, args.rounds, [each for each in args.contenders.split(",") if each], args.out)
    finally:  # what there is by now
        report.write(args.out)
    return 0


def run(name: str, wanted: dict[str, str], rounds: int, names: list[str], out: pathlib.Path) -> None:
    """Runs those of a benchmark's cases that are wanted, and keeps their records."""
    bench = importlib.import_module(f"tools.bench.{name}")
    if unknown := wanted.keys() - {key for case in bench.CASES for key in case}:
        keys = ", ".join(dict.fromkeys(key for case in bench.CASES for key in case))
        raise SystemExit(f"--only: {', '.join(map(repr, unknown))} is none of {keys}")
    lacks = getattr(bench, "missing", str)()
    if reason := lacks or (netlab.missing() if getattr(bench, "NEEDS_LAB", False) else ""):
        print(f"{name} is left out: {reason}", flush=True)
        return
    for case in bench.CASES:
        if all(str(case.get(key)) == value for key, value in wanted.items()):
            found = bench.run(case, rounds, names)
            record.write(out / "results" / f"{name}.jsonl", [found])
            print(report.table(found, out), flush=True)


if __name__ == "__main__":
    sys.exit(main())
