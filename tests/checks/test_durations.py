"""`tests/durations.json` knows the tests of the first tier, and the pages say how long they take."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers import tiers
from tests.helpers.order import DURATIONS

ROOT = pathlib.Path(__file__).parents[2]
TESTS = ROOT / "tests"
TENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = (*ONES, *TENS, "twenty", *(f"twenty-{one}" for one in ONES))
PROCESSES = 4  # of `make test` on two cores, by which the table is measured


def collects_all(config: pytest.Config) -> bool:
    """Returns whether a run looks for tests in all folders."""
    return [config.invocation_params.dir / argument for argument in config.args] == [TESTS]


def is_first_tier(config: pytest.Config) -> bool:
    """Returns whether a run has collected all tests of the first tier, and no others."""
    options = config.option
    chosen = options.keyword or options.deselect or config.getoption("splits", None)
    return collects_all(config) and options.markexpr in config.getini("addopts") and not chosen


def collect(*options: str) -> set[str]:
    """Returns the names of the tests that a run of its own finds."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--numprocesses=0", *options, str(TESTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def durations(request):
    """Returns the seconds of each test of the first tier, None for those that were not measured."""
    is_here = is_first_tier(request.config)
    names = {item.nodeid for item in request.session.items} if is_here else collect()
    known = json.loads(DURATIONS.read_text())
    return {name: known.get(name) for name in sorted(names)}


def test_the_table_knows_the_tests_of_the_first_tier(durations):
    missing = [name for name, seconds in durations.items() if seconds is None]
    assert len(durations) > 1000
    assert len(missing) <= 0.05 * len(durations), "\n".join(["run `make durations`:", *missing])


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_minutes_of_a_page_are_those_of_the_table(durations, page):
    """All processes busy to the end would need the least; those that compute wait for the cores, and the last ones run alone."""
    (word,) = re.findall(r"([\w-]+) minutes on two cores", (ROOT / page).read_text())
    least = sum(seconds or 0 for seconds in durations.values()) / PROCESSES / 60
    assert least <= NUMBERS.index(word) + 1 <= 2 * least, f"the table says {least:.1f} minutes at least"


def test_the_tests_that_were_moved_to_the_second_tier_exist(request):
    found = request.config.stash[tiers.COLLECTED] if collects_all(request.config) else collect("-m", "not slow")
    moved = json.loads(tiers.MOVED.read_text())
    assert moved and set(moved) <= found, "a test has another name now: change it in second_tier.json"
