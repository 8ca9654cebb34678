"""Kills, stops, unplugged and slow links, full disks and stolen ports at each phase of a job: it ends in the same bits, or in a sentence.

A seed that fails is run again by `python -m tests.chaos.program --keep=FOLDER SEED`.
"""

from __future__ import annotations

import collections

import pytest

from tests.chaos import faults, schedules, verdict

# Each fault at each phase once, half of each under either kind of cluster; the other half: `tests.chaos.program 42-83`.
SEEDS = range(schedules.GRID // 2)


@pytest.fixture(scope="session")
def references():
    """What undisturbed jobs have trained: each is run once."""
    return {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_ends_in_the_same_bits_or_in_a_sentence(tmp_path, seed, references):
    schedule = schedules.draw(seed)
    if schedule.needs_root and (reason := faults.missing()):
        pytest.skip(reason)
    result = verdict.run(schedule, tmp_path, references)
    assert not result["wrong"], f"seed {seed}, {result}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", schedules.KINDS)
def test_a_link_that_comes_back_in_time_costs_no_restart(tmp_path, kind, references):
    if reason := faults.missing():
        pytest.skip(reason)
    chief = schedules.TASKS[kind][0]
    fault = schedules.Fault("unplug", "training", chief, 5, schedules.LINK, 18.0)
    result = verdict.run(schedules.Schedule(0, kind, (fault,)), tmp_path, references)
    assert not result["wrong"], result
    assert result["end"] in ("bits", "steps") and not result["told"], result


def test_seeds_draw_every_fault_at_every_phase_of_every_kind_of_cluster():
    drawn = [schedules.draw(seed) for seed in range(schedules.GRID)]
    assert {(each.kind, each.faults[0].what, each.faults[0].phase) for each in drawn} == {
        (kind, fault, phase) for kind in schedules.KINDS for fault in schedules.FAULTS for phase in schedules.PHASES
    }
    for kind in schedules.KINDS:
        victims = {fault.victim for each in drawn if each.kind == kind for fault in each.faults}
        assert victims == {*schedules.TASKS[kind], schedules.LAUNCHER, schedules.LINK, *schedules.FOLDERS}
    tested = [drawn[seed] for seed in SEEDS]
    counts = collections.Counter((each.kind, each.faults[0].what) for each in tested)
    assert set(counts.values()) <= {3, 4} and len(counts) == 12
    assert {each.faults[0].seconds > 30 for each in tested} == {True, False}
    assert [schedules.draw(seed) for seed in SEEDS] == tested
