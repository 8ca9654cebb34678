"""Runs cases of public reports, and gives each of them to a test."""

from __future__ import annotations

import pytest

from tests.multiprocess import harness
from tests.multiprocess.reports import cases


def of(strategy):
    """Returns the parameters of a test, the kind and the name of each case that runs under a strategy."""
    return pytest.mark.parametrize(
        ("kind", "name"),
        [
            pytest.param(kind, name, marks=pytest.mark.full if each.full else ())
            for kind in cases.KINDS
            for name, each in cases.of_kind(kind).items()
            if strategy in each.strategies
        ],
    )


def check(once, strategy, kind, name):
    """Checks what each rank found in a case. The cases of a kind, strategy and tier share a run."""
    known = cases.of_kind(kind)
    together = [each.name for each in known.values() if strategy in each.strategies and each.full == known[name].full]

    def run(folder):
        if strategy == cases.SERVERS:
            harness.run_roles("reports_program", folder, 1, kind, *together)
        else:
            harness.run("reports_program", strategy, folder / "out", kind, *together)

    out = once.folder(f"reports {strategy} {kind} {together}", run)
    cases.check(known[name], [each[name] for each in harness.load_all(out / "out")])
