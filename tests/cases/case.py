"""A case: a function that trains a small model in the scope of a Trainer and returns pairs, found and right.

The right values come from NumPy or a plain loop in the case itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import pathlib
import pickle
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tests.cases import sources
from tests.cases.arms import MIRRORED, TWO_EACH, WORKERS, Arm
from tests.multiprocess.waiting import wait_until

QUICK, FULL, SLOW = "quick", "full", "slow"
Pairs = dict[str, tuple[Any, Any]]
Run = Callable[["World"], Pairs | None]
FIRST = 1  # cases of a source that run with an arm in the first tier; the others, which differ less, run in the second
_CASES: dict[str, dict[str, Case]] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, the tier of each arm that it runs with, the message that ends or accompanies it, and whether it ends its job."""

    run: Run
    source: str
    name: str
    tiers: dict[Arm, str]
    error: str = ""
    warning: str = ""
    ends_job: bool = False


@dataclasses.dataclass
class World:
    """A Trainer, the arm it is of, and a folder of the case, the same on all ranks."""

    trainer: Any
    arm: Arm
    folder: pathlib.Path
    _gathered: int = 0

    @property
    def rank(self) -> int:
        return int(json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"])

    @property
    def workers(self) -> int:
        return self.arm.workers

    @property
    def replicas(self) -> int:
        return int(self.trainer.num_replicas)

    def scope(self) -> Any:
        return self.trainer.scope()

    def gather(self, value: Any = None) -> list[Any]:
        """Returns what each rank has passed, once all have; by files, as a collective could hide a fault of another."""
        self._gathered += 1
        paths = [self.folder / f"gathered-{self._gathered}-{rank}" for rank in range(self.workers)]
        part = self.folder / f"part-{self.rank}"
        part.write_bytes(pickle.dumps(value))
        part.rename(paths[self.rank])
        wait_until(lambda: all(path.exists() for path in paths), 120)
        return [pickle.loads(path.read_bytes()) for path in paths]


def case(
    *arms: Arm,
    full: bool | tuple[Arm, ...] | None = None,
    slow: bool | tuple[Arm, ...] = (),
    error: str = "",
    warning: str = "",
    ends_job: bool = False,
    name: str = "",
) -> Callable[[Run], Run]:
    """Registers a function as a case.

    Args:
        *arms: What it runs with; by default two workers, and two devices of one process.
        full: True or the arms for which it runs in `make test-all`. By default those that mostly take the way of two
            workers: two devices of one process, and two workers of two each. () where their collectives matter.
        slow: True or the arms for which it runs in `make slow`.
        error: A pattern of the error that ends it on every rank.
        warning: A pattern of what it logs on at least one rank. Cases without one must log no warning.
        ends_job: Whether its error aborts the collectives of all ranks, so that its program can run nothing after it.
        name: Instead of the function's.
    """
    arms = arms or (MIRRORED, WORKERS)
    if full is None:
        full = (MIRRORED, TWO_EACH) if WORKERS in arms else ()

    def tier(arm: Arm) -> str:
        if slow is True or (slow and arm in slow):
            return SLOW
        if full is True or (full and arm in full):
            return FULL
        return QUICK

    def register(run: Run) -> Run:
        source = run.__module__.rpartition(".")[2]
        of_source = _CASES.setdefault(source, {})
        tiers = {}
        for arm in arms:
            quick = sum(each.tiers.get(arm) == QUICK for each in of_source.values())
            tiers[arm] = FULL if tier(arm) == QUICK and quick >= FIRST else tier(arm)
        made = Case(run, source, name or run.__name__, tiers, error, warning, ends_job)
        assert made.name not in of_source, f"{source} has two cases {made.name}"
        of_source[made.name] = made
        return run

    return register


def find(source: str, name: str) -> Case:
    """Returns a case."""
    importlib.import_module(f"{sources.__name__}.{source}")
    return _CASES[source][name]


def every(arm: Arm) -> list[Case]:
    """Returns all cases that run with an arm."""
    names = sorted(module.name for module in pkgutil.iter_modules(sources.__path__))
    for each in names:
        importlib.import_module(f"{sources.__name__}.{each}")
    return [one for each in names for one in _CASES.get(each, {}).values() if arm in one.tiers]


def evaluate(one: Case, world: World) -> dict[str, Any]:
    """Runs a case, and compares its pairs. Returns its error, and the lines that it logged."""
    keras.utils.set_random_seed(1)
    world.folder.mkdir(parents=True, exist_ok=True)
    result = {"error": "", "trace": ""}
    with logged() as lines:
        try:
            pairs = one.run(world)
            if not one.error:
                assert pairs, "a case compares something"
                for key, (found, right) in pairs.items():
                    compare(key, found, right)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {**result, "lines": list(lines)}


def compare(name: str, found: Any, right: Any) -> None:
    """Asserts that two structures have the same words, and the same numbers but for rounding."""
    if isinstance(right, dict):
        assert found.keys() == right.keys(), (name, found, right)
        for key, value in right.items():
            compare(f"{name} {key}", found[key], value)
    elif isinstance(right, (list, tuple)):
        assert len(found) == len(right), (name, found, right)
        for number, value in enumerate(right):
            compare(f"{name} {number}", found[number], value)
    elif isinstance(right, (str, pathlib.Path)):
        assert found == right, (name, found, right)
    else:
        numbers, right_numbers = np.asarray(found, "float64"), np.asarray(right, "float64")
        assert numbers.shape == right_numbers.shape, (name, found, right)
        np.testing.assert_allclose(numbers, right_numbers, rtol=1e-5, atol=1e-5, err_msg=name)


def check(one: Case, ranks: list[dict[str, Any]]) -> None:
    """Asserts what a case promises, of what its ranks found."""
    for result in ranks:
        if one.error:
            assert re.search(one.error, result["error"]), result["trace"] or "no error"
        else:
            assert not result["error"], result["trace"]
    lines = [line for result in ranks for line in result["lines"]]
    if one.warning:
        assert any(re.search(one.warning, line) for line in lines), lines
    elif not one.error:
        assert not lines, lines


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collects the warnings that tfdist logs meanwhile."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("tfdist")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
