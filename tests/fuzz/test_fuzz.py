"""Models, losses, optimizers, weights and batches that seeds have drawn: whatever they are, replicas train what arithmetic says.

A seed that fails is run again by `python -m tests.fuzz.program SEED`, with `--arm=workers` or `--arm=servers` if it failed there.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.fuzz import arms
from tests.fuzz import cases as cases_lib

QUICK = [1002]  # a loss of one number beside losses that a layer adds
QUICK_OF_WORKERS = [1001]  # a hinge's sum, and a dataset function with batches of several sizes
# 1000: a random layer. 10000: a layer that gathers the batch, in an execution whose steps have batches of several sizes. 10012: a mean
# beside validations. 10036: metrics that are no sums beside a mean, a count and compression. 20001: fits on a generator, and an
# object's compute_metrics. 20022: calls on batches, and a sum. 30082, 30235: split state, with averages that overwrite the weights.
# 90007: split state, and accumulated gradients whose norm the step logs.
FULL = [319, 338, 339, 342, 358, 1000, 10000, 10012, 10036, 20001, 20022, 30082, 30235, 90007]
# 1037: a loss of vectors and synchronized BatchNorm, in a step for which one worker has no data. 10000, 10005: workers' own rows.
# 10106: gathers beside gradients that are reduced in a condition. 20003: a softmax over the batch, in calls on batches. 20025: pairs of
# examples, in fits on a generator. 71310: a queue of the batch, after a validation step for which one worker has no data.
# 30108, 30235: split state, with averages that overwrite the weights. 80006, 80015: a scaled loss and split state beside metrics of the
# whole batch.
FULL_OF_WORKERS = [1002, 1003, 1037, 10000, 10005, 10106, 20003, 20025, 30108, 30235, 71310, 80006, 80015]
# Each begins with seeds of its own, and goes on until its time is over.
GROUPS = [
    *(("replicas", first, 3) for first in range(0, 300, 60)),
    *(("replicas", first, 3) for first in range(1000, 1600, 100)),
    *(("workers", first, 3) for first in (1000, 1100, 1200)),
    ("servers", 1000, 3),
    *(("replicas", first, 3) for first in range(10000, 10300, 100)),
    *(("workers", first, 3) for first in (10000, 10100)),
    ("servers", 10000, 3),
    *(("replicas", first, 3) for first in range(20000, 20300, 100)),
    *(("workers", first, 3) for first in (20000, 20100)),
    ("servers", 20000, 3),
    *((arm, first, 3) for first in (30000, 80000) for arm in ("replicas", "workers")),
    *((arm, 90000, 3) for arm in arms.ARMS),
]


def check(arm, *arguments, timeout):
    """Trains the cases of seeds in a process of their own, as they want more virtual CPUs than other tests. Returns the seeds."""
    command = [sys.executable, "-m", "tests.fuzz.program", f"--arm={arm}", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=root, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [
        f"seed {each['seed']} (python -m tests.fuzz.program --arm={arm} {each['seed']}): {each['case']}\n  "
        + "\n  ".join(each["differences"])
        for each in results
        if each["differences"]
    ]
    assert not failed, "\n".join(failed)
    assert done.returncode == 0, done.stderr[-2000:]
    return [each["seed"] for each in results]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arm", "seeds"), [("replicas", QUICK), ("workers", QUICK_OF_WORKERS)])
def test_a_few_cases(arm, seeds):
    assert check(arm, *seeds, timeout=280) == seeds


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arm", "seeds"), [("replicas", FULL), ("workers", FULL_OF_WORKERS), ("servers", [1001, 1003, 10000, 20009, 71620])]
)
def test_cases_that_touch_most_features(arm, seeds):
    assert check(arm, *seeds, timeout=580) == seeds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arm", "first", "minutes"), GROUPS)
def test_cases(arm, first, minutes):
    assert check(arm, f"--minutes={minutes}", first, timeout=880)[0] == first


def test_seeds_draw_all_features():
    cases = [cases_lib.draw(seed) for seed in range(300)]
    assert {case.replicas for case in cases} == {1, 2, 3, 4, 8}
    assert {case.model for case in cases} == set(cases_lib.MODELS)
    assert sum(case.starved for case in cases) > 20, "batches that leave a replica without examples"
    for name in ("compression", "class_weight", "validation", "weights", "jit", "eager"):
        assert sum(bool(getattr(case, name)) for case in cases) > 5, name
    assert cases == [cases_lib.draw_first(seed) for seed in range(300)]
    assert cases_lib.draw(7) == cases_lib.draw(7)


@pytest.mark.parametrize("arm", arms.ARMS)
def test_seeds_from_10000_on_draw_assigned_weights_metrics_of_batches_own_rows_and_reads(arm):
    cases = [arms.draw(seed, arm) for seed in range(10000, 10300)]
    metrics = cases_lib.ADDING_METRICS if arm == "servers" else cases_lib.BATCH_METRICS
    assert {*cases_lib.ASSIGNED} == {kind for case in cases for kind in case.assigned}
    assert {*metrics} == {name for case in cases for name in case.batch_metrics}
    assert {*cases_lib.OWN, ""} == {case.own for case in cases}
    assert {*cases_lib.READS, ""} == {case.reads for case in cases}
    lengths = [case.own_first * 2 - case.rows for case in cases if case.own]
    assert 0 in lengths and min(lengths) < 0 < max(lengths), "workers with rows of equal and unequal length"
    for case in cases:
        assert sorted(row for step in case.steps() for row in step) == list(range(case.rows)), "each row once"
        validated = [row for parts in case.validation_parts() for part in parts for row in part]
        assert sorted(validated) == list(range(case.validation[0] if case.validation else 0))


@pytest.mark.parametrize("arm", arms.ARMS)
def test_seeds_from_20000_on_draw_calls_overrides_integers_and_losses_that_compare_examples(arm):
    cases = [arms.draw(seed, arm) for seed in range(20000, 20300)]
    assert {*cases_lib.LOOPS, ""} == {case.loop for case in cases}
    assert {*cases_lib.OVERRIDES, ""} == {case.override for case in cases}
    assert {*cases_lib.COUNTERS} <= {name for case in cases for name in case.batch_metrics}
    assert {*cases_lib.COMPARING} <= {case.loss for case in cases}
    generators = [case for case in cases if case.loop == "generator"]
    assert sum(case.fit_steps < len(case.parts()) for case in generators) > 20, "fits that leave batches"
    assert {0, 1, 2} == {case.evaluated_steps for case in generators}
    on_batch = [case for case in cases if case.loop == "on_batch"]
    assert sum(case.reduction == "sum" for case in on_batch) > 5
    assert sum("sum" in case.assigned for case in on_batch) > 5
    for case in on_batch:
        rows = [row for steps, _ in case.passes() for parts in steps for part in parts for row in part]
        assert sorted(rows) == sorted([*range(case.rows)] * case.epochs), "each row once an epoch"


@pytest.mark.parametrize("arm", ["replicas", "workers"])
def test_seeds_from_30000_on_draw_split_state_with_each_option(arm):
    cases = [case for case in (arms.draw(seed, arm) for seed in range(30000, 30300)) if case.shards]
    assert {case.optimizer for case in cases} == {case.optimizer for case in map(cases_lib.draw, range(300))}
    for option in ("use_ema", "gradient_accumulation_steps", "clipnorm", "loss_scale_factor"):
        assert sum(bool(case.options.get(option)) for case in cases) > 5, option
    assert not any(arms.draw(seed, arm).shards for seed in range(20000, 20300))


@pytest.mark.parametrize("arm", arms.ARMS)
def test_seeds_from_90000_on_draw_steps_that_use_their_gradients(arm):
    drawn = [arms.draw(seed, arm) for seed in range(90000, 90300)]
    not_drawn = {"sharp"} if arm == "servers" else set()
    assert {*cases_lib.USES, ""} - not_drawn == {case.use for case in drawn}
    used = [case for case in drawn if case.use]
    assert len(used) > 150
    for option in ("shards", "loop", "weights", "assigned") if arm != "servers" else ("loop", "weights", "assigned"):
        assert sum(bool(getattr(case, option)) for case in used) > 10, option
    assert not any(arms.draw(seed, arm).use for seed in (*range(1000, 1100), *range(80000, 80100)))


def test_seeds_below_20000_draw_none_of_that():
    for case in (arms.draw(seed, arm) for arm in arms.ARMS for seed in (*range(1000, 1100), *range(10000, 10100))):
        assert not (case.loop or case.override or {*case.batch_metrics} & {*cases_lib.COUNTERS}), case.seed


def test_seeds_below_10000_draw_none_of_it():
    for case in (arms.draw(seed, arm) for arm in arms.ARMS for seed in (*range(100), *range(1000, 1100))):
        assert not (case.assigned or case.batch_metrics or case.own or case.reads), case.seed


@pytest.mark.parametrize("arm", arms.ARMS)
def test_later_seeds_draw_what_was_added(arm):
    cases = [arms.draw(seed, arm) for seed in range(1000, 1300)]
    assert {*cases_lib.NEW_LOSSES} <= {case.loss for case in cases}
    assert {*cases_lib.NOISES, ""} == {case.noise for case in cases}
    assert {"tall", *cases_lib.MODELS} - {case.model for case in cases} <= {"masked_outputs"}
    assert {"MEAN", "ONLY_FIRST_REPLICA", ""} == {case.aggregation for case in cases}
    assert sum(bool(case.pieces) for case in cases) > 30
    assert sum(case.loss in cases_lib.ONE_NUMBER and case.model == "outputs" for case in cases) > 5
    for case in cases:
        assert sorted(row for step in case.steps() for row in step) == list(range(case.rows)), "each row once"
