"""Who is named when workers compute different gradients: a table of what hosts that compute wrong leave behind."""

from __future__ import annotations

import pytest

from tfdist.step.disputes import Checksums, culprits, disputed

RIGHT = (10.0, 11.0, 12.0)  # of the part of each worker


def found(workers: int, wrong: dict[tuple[int, str], float]) -> list[Checksums]:
    """Returns what workers compute that are right, except for some values."""
    rows = []
    for rank in range(workers):
        values = {
            "own": RIGHT[rank],
            "checked": RIGHT[(rank + 1) % workers],
            "own_again": RIGHT[rank],
            "checked_again": RIGHT[(rank + 1) % workers],
            "third": RIGHT[(rank + 2) % workers] if workers > 2 else None,
        }
        values |= {name: value for (other, name), value in wrong.items() if other == rank}
        rows.append(Checksums(**values))
    return rows


def always(rank: int, *names: str) -> dict[tuple[int, str], float]:
    return {(rank, name): 90.0 + number for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("workers", "wrong", "named"),
    [
        (2, {}, []),
        (2, {(1, "own"): 99.0}, [1]),  # once, in the step
        (2, {(0, "checked"): 99.0}, [0]),  # once, in the repetition
        (2, {(1, "own"): 99.0, (1, "own_again"): 99.0}, [0, 1]),  # each stays with its result
        (2, {(0, "own"): 98.0, (1, "own"): 99.0}, []),  # none can repeat its own step
        (2, {(1, "own"): 97.0, (0, "checked"): 98.0, (0, "checked_again"): 99.0}, []),
        (3, {(1, "own"): 99.0}, [1]),
        (3, {(2, "checked"): 99.0}, [2]),
        (3, always(1, "own", "checked", "own_again", "checked_again", "third"), [1]),
        (3, {(0, "own"): 97.0, (1, "own"): 98.0, (2, "own"): 99.0}, []),
        (3, {(0, "checked"): 97.0, (1, "checked"): 98.0}, []),  # two accused: another cause
        (3, {(0, "checked"): 97.0, (2, "third"): 98.0}, []),  # three results
    ],
)
def test_one_host_is_named_and_a_step_that_cannot_be_repeated_names_none(workers, wrong, named):
    rows = found(workers, wrong)
    assert bool(disputed(rows)) == bool(wrong)
    assert culprits(rows) == named
