"""What a seed does to a job: which faults, at which phases of it, to which of its tasks, and for how long."""

from __future__ import annotations

import dataclasses
import math
import random

from tools.chaos import LAUNCHER

KINDS = ("multi_worker_mirrored", "parameter_server")
PHASES = ("before", "between", "tracing", "training", "saving", "validation", "end")
FAULTS = ("kill", "stop", "unplug", "slow", "full", "steal")
TASKS = {KINDS[0]: ("worker:0", "worker:1"), KINDS[1]: ("chief:0", "worker:0", "worker:1", "ps:0")}
FOLDERS = ("backup", "tmp", "logs")
LINK = "link"
# Every fault at every phase of every kind of cluster. Their numbers have no common divisor, so that those of a seed differ.
GRID = len(KINDS) * len(FAULTS) * len(PHASES)
# At how many times of a phase its fault may happen, at most.
_TIMES = {"training": 25, "saving": 3, "validation": 4}
_LONGER_THAN_ANY_LIMIT = {KINDS[0]: 75.0, KINDS[1]: 45.0}  # seconds
_LONG_EVERY, _SECOND_EVERY = (
    3,
    5,
)  # of so many rounds of faults one has long ones; of so many seeds one has a second fault
assert math.gcd(len(FAULTS), len(PHASES)) == 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens to a job.

    Attributes:
        what: One of `FAULTS`.
        phase: One of `PHASES`.
        task: Which task waits there until it has happened.
        number: At which time that the task comes there.
        victim: What it happens to: a task, `LAUNCHER`, `LINK`, or one of `FOLDERS`.
        seconds: After which it is over; a kill is at once.
    """

    what: str
    phase: str
    task: str
    number: int
    victim: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens to a job.

    Attributes:
        seed: What it was drawn from.
        kind: The strategy, one of `KINDS`.
        faults: What happens, in the order of phases.
    """

    seed: int
    kind: str
    faults: tuple[Fault, ...]

    @property
    def has_link(self) -> bool:
        """Whether the tasks must run on two hosts."""
        return any(fault.victim == LINK for fault in self.faults)

    @property
    def needs_root(self) -> bool:
        """Whether it takes namespaces or mounts."""
        return self.has_link or any(fault.what == "full" for fault in self.faults)

    def __str__(self) -> str:
        told = ", ".join(
            f"{f.what} {f.victim} at {f.phase} {f.number} of {f.task}, {f.seconds:g} s" for f in self.faults
        )
        return f"{self.kind}: {told}"


def draw(seed: int) -> Schedule:
    """Returns the schedule of a seed. `GRID` seeds in a row have each fault at each phase of each kind of cluster once.

    Six in a row have all faults, seven all phases, and half of each six have either kind.
    """
    chance = random.Random(seed)
    kind = KINDS[(seed + seed // len(FAULTS)) % 2]
    what, place = FAULTS[seed % len(FAULTS)], seed % len(PHASES)
    faults = [_draw_fault(chance, kind, what, PHASES[place], seed // len(FAULTS) % _LONG_EVERY == 2)]
    if seed % _SECOND_EVERY == 0:
        later = PHASES[chance.randint(place, len(PHASES) - 1)]
        faults.append(_draw_fault(chance, kind, chance.choice(("kill", "stop")), later, False))
    return Schedule(seed, kind, tuple(faults))


def _draw_fault(chance: random.Random, kind: str, what: str, phase: str, long: bool) -> Fault:
    tasks = TASKS[kind]
    task = victim = chance.choice(tasks)
    if what in ("unplug", "slow"):
        victim = LINK
    elif what == "full":
        victim = chance.choice(FOLDERS)
    elif what in ("kill", "stop") and chance.random() < 0.15:
        victim = LAUNCHER
    if kind == KINDS[1] and phase not in ("before", "between"):
        task = tasks[0]  # the others serve: they come to no other phase
    seconds = round(chance.uniform(1, 8 if what in ("slow", "full", "steal") else 3), 1)
    if long and what in ("stop", "unplug"):
        seconds = _LONGER_THAN_ANY_LIMIT[kind]
    return Fault(what, phase, task, chance.randint(1, _TIMES.get(phase, 1)), victim, 0.0 if what == "kill" else seconds)
