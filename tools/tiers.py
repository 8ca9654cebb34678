"""Moves tests to the second tier whose time in the first tier is not worth the lines that only they run.

    python -m tools.tiers [--data=build/coverage] [--lines=0.5]

`make tiers` runs it, after all tests of the first tier have run under coverage, those that it has moved before, too. A test that takes less
than a second stays. From the longest on, a test is moved if fewer lines of the package than `--lines` for each of its seconds run in no other
test that stays. Tests that compare what a test before them in their file has computed have hardly any lines of their own: they go with it.
The result is `tests/second_tier.json`; tests.helpers.tiers marks its tests `full`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import sqlite3
import sys
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 1.0  # a shorter test stays
OWN_LINES = 20  # a test that runs fewer has no computation of its own
# Stay whatever they cost: the oracles of numbers, whose worth is not in lines. `cases/case.py` itself limits the cases of the first tier.
KEPT = (
    "tests/cases/",
    "tests/fuzz/",
    "tests/multiprocess/test_any_size.py::test_four_replicas_train_to_the_same_bits_in_any_processes[4-1-grpc",
)

Lines = set[tuple[str, int]]


def read(folder: pathlib.Path, package: str = "tfdist") -> dict[str, Lines]:
    """Returns the lines of a package that each test has run, by the test's id."""
    from coverage import numbits

    found: dict[str, Lines] = collections.defaultdict(set)
    for path in folder.glob("data*"):
        with contextlib.suppress(sqlite3.DatabaseError), sqlite3.connect(f"file:{path}?mode=ro", uri=True) as data:
            # Of a process that was killed while it wrote, the file has no tables.
            files = dict(data.execute("SELECT id, path FROM file"))
            tests = dict(data.execute("SELECT id, context FROM context"))
            for file, test, bits in data.execute("SELECT file_id, context_id, numbits FROM line_bits"):
                _, _, name = files[file].rpartition(f"/{package}/")
                found[tests[test]].update((name, number) for number in numbits.numbits_to_nums(bits))
    return found


def units(tests: Iterable[str], lines: dict[str, Lines], seconds: dict[str, float]) -> list[list[str]]:
    """Returns groups of tests that stay or go together: a long test, and those after it in its file that have hardly any lines of their own."""
    found: list[list[str]] = []
    for test in tests:
        file = test.partition("::")[0]
        is_dependent = len(lines.get(test, ())) < OWN_LINES and seconds.get(test, 0) < SECONDS
        if is_dependent and found and found[-1][0].startswith(f"{file}::") and seconds.get(found[-1][0], 0) >= SECONDS:
            found[-1].append(test)
        else:
            found.append([test])
    return found


def choose(groups: Sequence[list[str]], lines: dict[str, Lines], seconds: dict[str, float], least: float) -> list[str]:
    """Returns the tests to move: of the groups that have fewer lines for themselves than `least` a second."""
    of_group = [set().union(*(lines.get(test, set()) for test in group)) for group in groups]
    runs = collections.Counter(line for each in of_group for line in each)
    cost = [sum(seconds.get(test, 0) for test in group) for group in groups]
    moved = []
    for number in sorted(range(len(groups)), key=lambda number: -cost[number]):
        if groups[number][0].startswith(KEPT):
            continue
        alone = sum(runs[line] == 1 for line in of_group[number])
        if cost[number] >= SECONDS and of_group[number] and alone < least * cost[number]:
            runs.subtract(of_group[number])
            moved += groups[number]
    return sorted(moved)


def main(argv: list[str] | None = None) -> int:
    """Writes the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=pathlib.Path, default=ROOT / "build/coverage", help="the folder of coverage's data"
    )
    parser.add_argument("--tests", type=pathlib.Path, help="a file with the ids of the first tier's tests, a line each")
    parser.add_argument("--lines", type=float, default=0.5, help="lines a second that a test must have for itself")
    options = parser.parse_args(argv)
    tests = [line for line in options.tests.read_text().splitlines() if "::" in line]
    seconds = json.loads((ROOT / "tests/durations.json").read_text())
    lines = read(options.data)
    moved = choose(units(tests, lines, seconds), lines, seconds, options.lines)
    (ROOT / "tests/second_tier.json").write_text(json.dumps(moved, indent=0) + "\n")
    kept_lines = set().union(*(lines.get(test, set()) for test in set(tests) - set(moved)))
    lost = len(set().union(*(lines.get(test, set()) for test in moved)) - kept_lines)
    whole, saved = (sum(seconds.get(test, 0) for test in each) for each in (tests, moved))
    print(
        f"{len(moved)} of {len(tests)} tests go to the second tier, {saved:.0f} of {whole:.0f} s; only they run {lost} lines of {lost + len(kept_lines)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
