"""Who is right when two workers compute different gradients from the same examples: pure functions of checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_MOST_UNSTEADY = (
    1  # workers whose own results differ: a faulty host is one, and a model that draws its own numbers is all of them
)


@dataclasses.dataclass(frozen=True)
class Checksums:
    """The results of one worker at one step. Worker `r` checks the part of worker `r + 1`.

    Attributes:
        own: The checksum of its own part, in the step.
        checked: The checksum of the next worker's part.
        own_again: As `own`, once more, in the function that checks.
        checked_again: As `checked`, once more.
        third: The checksum of the part of worker `r + 2`; None with two workers.
    """

    own: float
    checked: float
    own_again: float | None = None
    checked_again: float | None = None
    third: float | None = None


def disputed(found: Sequence[Checksums]) -> list[int]:
    """Returns the workers whose part two workers have computed differently."""
    return [rank for rank, each in enumerate(found) if found[rank - 1].checked != each.own]


def culprits(found: Sequence[Checksums]) -> list[int]:
    """Returns the workers that compute wrong: one; both of two that each stay with their result; none if the step cannot be repeated."""
    unsteady = [rank for rank, each in enumerate(found) if each.own_again != each.own]
    if len(unsteady) > _MOST_UNSTEADY:
        return []
    judge = _by_repetition if len(found) == 2 else _by_majority
    accused = set()
    for rank in disputed(found):
        wrong = judge(found, rank)
        if not wrong:
            return []
        accused |= wrong
    # A host that computes wrong does not make others wrong, so several accused mean another cause.
    return sorted(accused) if len(accused) == 1 or len(found) == 2 else []


def _by_majority(found: Sequence[Checksums], rank: int) -> set[int]:
    own = found[rank].own
    checked = found[rank - 1].checked
    third = found[rank - 2].third
    if third == checked:
        return {rank}
    if third == own:
        return {(rank - 1) % len(found)}
    return set()


def _by_repetition(found: Sequence[Checksums], rank: int) -> set[int]:
    other = 1 - rank
    own, own_again = found[rank].own, found[rank].own_again
    checked, checked_again = found[other].checked, found[other].checked_again
    if own == own_again and checked == checked_again:
        return {rank, other}
    if checked == checked_again == own_again:
        return {rank}
    if own == own_again == checked_again:
        return {other}
    return set()
