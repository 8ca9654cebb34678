"""Models, losses, optimizers, weights and batches that seeds have drawn: whatever they are, replicas train what arithmetic says.

A seed that fails is run again by `python -m tests.fuzz.program SEED`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.fuzz import cases as cases_lib

QUICK = [319, 338, 339, 342, 358]
GROUPS = [range(first, first + 30) for first in range(0, 300, 30)]


def check(seeds, timeout):
    """Trains the cases of seeds in a process of their own, as they want more virtual CPUs than other tests."""
    command = [sys.executable, "-m", "tests.fuzz.program", *map(str, seeds)]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=root, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [
        f"seed {each['seed']} (python -m tests.fuzz.program {each['seed']}): {each['case']}\n  "
        + "\n  ".join(each["differences"])
        for each in results
        if each["differences"]
    ]
    assert not failed, "\n".join(failed)
    assert [each["seed"] for each in results] == list(seeds), done.stderr[-2000:]


@pytest.mark.full
def test_cases_that_touch_most_features():
    check(QUICK, 280)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", GROUPS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_cases(seeds):
    check(seeds, 3500)


def test_seeds_draw_all_features():
    cases = [cases_lib.draw(seed) for group in GROUPS for seed in group]
    assert {case.replicas for case in cases} == {1, 2, 3, 4, 8}
    assert {case.model for case in cases} == set(cases_lib.MODELS)
    assert sum(case.starved for case in cases) > 20, "batches that leave a replica without examples"
    for name in ("compression", "class_weight", "validation", "weights", "jit", "eager"):
        assert sum(bool(getattr(case, name)) for case in cases) > 5, name
    assert cases_lib.draw(7) == cases_lib.draw(7)
