"""Cases of public bug reports: each trains a small model in the scope of a Trainer and returns pairs of numbers, found and right.

A file here holds the cases of one kind. The right numbers come from NumPy or a plain loop in the case itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MIRRORED, WORKERS, SERVERS = "mirrored", "multi_worker_mirrored", "parameter_server"
TWO_EACH = "multi_worker_mirrored with devices=2"
ALL = (MIRRORED, WORKERS, TWO_EACH, SERVERS)
KINDS = (
    "assigned",
    "reading",
    "policies",
    "own_slices",
    "distributions",
    "metrics",
    "compared",
    "own_division",
    "unknown_length",
    "writers",
    "messages",
    "on_batch",
    "overrides",
    "integers",
    "generators",
    "outputs",
)
Pairs = dict[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, the strategies that it runs under, and the message that ends or accompanies it."""

    run: Callable[[World], Pairs]
    strategies: tuple[str, ...]
    error: str = ""
    warning: str = ""
    full: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


@dataclasses.dataclass
class World:
    """A Trainer, where its case runs, and a folder for files, the same on all ranks."""

    trainer: Any
    strategy: str
    folder: str = ""

    @property
    def rank(self) -> int:
        return int(json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"])

    @property
    def workers(self) -> int:
        return 2 if self.strategy in (WORKERS, TWO_EACH) else 1

    @property
    def replicas(self) -> int:
        return int(self.trainer.num_replicas)

    def scope(self) -> Any:
        return self.trainer.scope()


def case(
    *strategies: str, error: str = "", warning: str = "", full: bool = False
) -> Callable[[Callable[[World], Pairs]], Case]:
    """Marks a function as a case.

    Args:
        *strategies: What it runs under; by default, `mirrored` and two workers.
        error: A pattern of the error that ends it on every rank.
        warning: A pattern of what it logs on at least one rank. Cases without one must log no warning.
        full: Runs in `make test-all` only.
    """
    return lambda run: Case(run, strategies or (MIRRORED, WORKERS), error, warning, full)


def of_kind(kind: str) -> dict[str, Case]:
    """Returns a kind's cases by name."""
    module = importlib.import_module(f"tests.multiprocess.reports.{kind}")
    return {each.name: each for each in vars(module).values() if isinstance(each, Case)}


def evaluate(one: Case, world: World) -> dict[str, Any]:
    """Runs a case. Returns its pairs, its error, and the lines that it logged."""
    result: dict[str, Any] = {"pairs": {}, "error": "", "trace": "", "lines": []}
    with logged() as lines:
        try:
            pairs = one.run(world)
            result["pairs"] = {
                key: (np.asarray(a, "float64"), np.asarray(b, "float64")) for key, (a, b) in pairs.items()
            }
        except Exception as error:
            result["error"], result["trace"] = f"{type(error).__name__}: {error}", traceback.format_exc()
    result["lines"] = list(lines)
    return result


def check(one: Case, ranks: list[dict[str, Any]]) -> None:
    """Asserts what a case promises, of what its ranks found."""
    for result in ranks:
        if one.error:
            assert re.search(one.error, result["error"]), result["trace"] or "no error"
            continue
        assert not result["error"], result["trace"]
        assert result["pairs"], "a case compares something"
        for key, (found, right) in result["pairs"].items():
            assert found.shape == right.shape, (key, found, right)
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5, err_msg=key)
    lines = [line for result in ranks for line in result["lines"]]
    if one.warning:
        assert any(re.search(one.warning, line) for line in lines), lines
    elif not one.error:
        assert not lines


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
