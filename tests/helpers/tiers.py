"""Says of a test's parameters in which tier they run: `make test`, `make test-all` or `make slow`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


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
