"""The tiers of tests: `make test`, `make test-all` and `make slow`.

A mark `full` or `slow` puts a test into a tier by hand, and `cases` a test's parameters. `make tiers` puts into the second one what costs more
than it finds (see `tools/tiers.py`).
"""

import json
import os
import pathlib
from collections.abc import Container, Iterable
from typing import Any

import pytest

MOVED = pathlib.Path(__file__).parents[1] / "second_tier.json"
COLLECTED = pytest.StashKey[set[str]]()  # the ids of all tests that pytest has found, before it leaves out other tiers


def cases(every: Iterable[Any], quick: int | Container[Any] = (), slow: Container[Any] = ()) -> list[Any]:
    """Returns a test's parameters, marked.

    Args:
        every: The values of a parameter; of several parameters, tuples.
        quick: Those that `make test` runs: which, or how many, from the first on.
        slow: Those that `make slow` runs. All others run in `make test-all`.
    """
    found = []
    for number, case in enumerate(every):
        values = case if isinstance(case, tuple) else (case,)
        in_quick = number < quick if isinstance(quick, int) else case in quick
        marks = pytest.mark.slow if case in slow else () if in_quick else pytest.mark.full
        found.append(pytest.param(*values, marks=marks))
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that `make tiers` has moved to the second tier."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    if "ALL_OF_FIRST_TIER" in os.environ:
        return
    moved = set(json.loads(MOVED.read_text()))
    for item in items:
        if item.nodeid in moved and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.full)
