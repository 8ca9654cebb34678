"""Gives each case of an arm to a test, and runs those of a session together."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
from typing import Any

import pytest

from tests.cases.arms import SERVERS, Arm
from tests.cases.case import FULL, QUICK, SLOW, Case, every
from tests.helpers import fork_server
from tests.helpers.once import Once
from tests.multiprocess import harness

MARKS = {QUICK: (), FULL: pytest.mark.full, SLOW: pytest.mark.slow}
TOGETHER = 120  # at most, in one process


def of(arm: Arm, first: str = "a", last: str = "z") -> pytest.MarkDecorator:
    """Returns the parameters of a test, `arm` and `one`: the cases that run with an arm, of the sources between two letters."""
    cases = [
        pytest.param(arm, one, marks=MARKS[one.tiers[arm]], id=f"{one.source}-{one.name}")
        for one in every(arm)
        if first <= one.source[0] <= last
    ]
    return pytest.mark.parametrize(("arm", "one"), cases)


def results(once: Once, item: pytest.Item, arm: Arm, one: Case) -> list[dict[str, Any]]:
    """Returns what each rank found in a case. The chosen cases of an arm in a file run together."""
    cases = [
        each.callspec.params["one"]
        for each in item.session.items
        if each.path == item.path and each.callspec.params["arm"] == arm
    ]
    together = next(program for program in programs(cases) if one in program)
    names = [f"{each.source}.{each.name}" for each in together]
    out = once.folder(f"cases {arm.name} {names}", lambda folder: run(arm, names, folder)) / "out"
    ended = out / "ended.txt"
    found = []
    for path in sorted(out.glob("rank*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        found += [line for line in lines if line["case"] == f"{one.source}.{one.name}"]
    assert len(found) == arm.workers, ended.read_text() if ended.exists() else "no results"
    return found


def programs(cases: list[Case]) -> list[list[Case]]:
    """Divides cases into those of one program. A case that ends its job is the last of its program."""
    last = [one for one in cases if one.ends_job]
    others = [one for one in cases if not one.ends_job]
    number = max(math.ceil(len(others) / TOGETHER), len(last))
    return [others[n * TOGETHER : (n + 1) * TOGETHER] + last[n : n + 1] for n in range(number)]


def run(arm: Arm, names: list[str], folder: pathlib.Path) -> None:
    """Runs cases in one program for each task. If it ends before their end, writes why."""
    out = folder / "out"
    out.mkdir()
    command = fork_server.command("tests.cases.program", arm.name, str(out), *names)
    try:
        if arm == SERVERS:
            harness.run_command_in_roles(command, folder, arm.workers)
        else:
            is_cluster = arm.strategy.startswith("multi_worker")
            harness.run_command(command, out, arm.workers if is_cluster else 0)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        (out / "ended.txt").write_text(str(error))
