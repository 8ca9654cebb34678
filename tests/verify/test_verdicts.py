"""The verdicts of `tfdist verify` on records with a planted fault: each is found, at its first update, with its cause."""

from __future__ import annotations

import copy

import pytest

from tfdist.verify import verdicts
from tfdist.verify.verdicts import DIFFERS, EQUAL, KNOWN, NOTE, Arm

UPDATES = 5


def head(replicas=2, **changed):
    return {
        "kind": "fit",
        "fit": 1,
        "update": 0,
        "replicas": replicas,
        "asynchronous": False,
        "compression": [],
        "policy": "float32",
        "types": {"dense": "float32"},
        "differs": {},
        "initial": {"dense/kernel": 1},
        "bytes": 4,
        **changed,
    }


def update(number, part=(8, 80), **changed):
    variable = {"checksum": 100 + number, "norm": 1.0, "sketch": [1.0, -1.0], "agrees": True}
    return {
        "kind": "update",
        "update": number,
        "fit": 1,
        "time": float(number),
        "logs": {"loss": 1 / number},
        "gradient": {"norm": 2.0, "sketch": [1.0, -3.0]},
        "rate": [0.1],
        "iterations": [number],
        "examples": [part[0], part[1] + number],
        "variables": {"dense/kernel": variable},
        **changed,
    }


def one_device():
    return {"worker-0": [head(1), *(update(number, (16, 160 + number)) for number in range(1, UPDATES + 1))]}


def two_workers():
    """Returns the records of two workers that train what `one_device` trains."""
    parts = {"worker-0": (8, 70), "worker-1": (8, 90)}
    return {task: [head(), *(update(n, part) for n in range(1, UPDATES + 1))] for task, part in parts.items()}


def judge(planted, resumed=None, killed_at=None):
    resumed = Arm(resumed, killed_at) if resumed else None
    found = verdicts.judge(Arm(one_device()), Arm(one_device()), Arm(planted), resumed, "2 workers")
    return {verdict.check: verdict for verdict in found}


def test_right_records_are_equal_bit_for_bit():
    resumed = two_workers()
    for entries in resumed.values():
        entries[4:4] = [head(update=2), *copy.deepcopy(entries[3:4])]
    found = judge(two_workers(), resumed, killed_at=3)
    assert {verdict.status for verdict in found.values()} == {EQUAL, NOTE}  # the note is the speed
    assert found["resume exact"].text == "killed after update 3, resumed after 2, equal bits until 5"
    line = verdicts.conclusion(list(found.values()), "2 workers", UPDATES)
    assert line == "2 workers = 1 device, bit for bit, 5 updates; resume exact"


def scaled(factor, with_gradients=True):
    def plant(records):
        for entries in records.values():
            for entry in entries[1:]:
                variable = entry["variables"]["dense/kernel"]
                variable["checksum"] += 1000
                for scaled in (entry["gradient"], variable)[not with_gradients :]:
                    scaled["norm"] *= factor
                    scaled["sketch"] = [factor * value for value in scaled["sketch"]]

    return plant


def change(task, number, **changed):
    return lambda records: records[task][number].update(changed)


def change_variable(task, number, **changed):
    return lambda records: records[task][number]["variables"]["dense/kernel"].update(changed)


def same_shard(records):
    for entry, other in zip(records["worker-0"][1:], records["worker-1"][1:], strict=True):
        other["examples"] = entry["examples"]


def reordered(records):
    entries = records["worker-1"]
    entries[1]["examples"], entries[2]["examples"] = entries[2]["examples"], entries[1]["examples"]


def silently_float32(records):
    for entries in records.values():
        entries[0]["policy"] = "mixed_float16"


def unequal_metric(records):
    for entries in records.values():
        entries[3]["logs"]["loss"] = 7.0


@pytest.mark.parametrize(
    ("plant", "check", "first", "cause"),
    [
        (same_shard, "same examples", 1, "worker-0 and worker-1 read the same ones"),
        (
            change("worker-1", 3, examples=[4, 93]),
            "same examples",
            3,
            "12 in place of 16. Divide the global batch size",
        ),
        (
            change("worker-1", 3, examples=[8, 5]),
            "same examples",
            3,
            "do the workers shuffle or draw with different seeds?",
        ),
        (reordered, "same examples", 1, "in another order. Shuffle before sharding"),
        (change("worker-1", 4, rate=[0.5]), "ranks agree", 4, "learning rate of worker-1 is 0.5, that of worker-0 0.1"),
        (
            change_variable("worker-1", 2, checksum=7),
            "ranks agree",
            2,
            "worker-1 differs from worker-0 in dense/kernel",
        ),
        (
            change_variable("worker-0", 2, agrees=False),
            "ranks agree",
            2,
            "the replicas of worker-0 differ in dense/kernel",
        ),
        (scaled(0.5), "scale", 1, "gradients of 2 workers are 0.5 of one device's: the loss is divided twice"),
        (scaled(2.0), "scale", 1, "gradients of 2 workers are 2 of one device's: the gradient is not divided"),
        (scaled(0.5, with_gradients=False), "scale", 1, "updates of 2 workers are 0.5 of one device's: the loss is"),
        (scaled(1.3), "within rounding", 1, "differs by 3.0e-01 of its size, most in dense/kernel"),
        (unequal_metric, "loss and metrics", 3, "loss is 7 in place of 0.3333333"),
        (silently_float32, "precision used", None, "the policy is mixed_float16, and all layers compute in float32"),
    ],
)
def test_a_planted_fault_is_found_and_named(plant, check, first, cause):
    planted = two_workers()
    plant(planted)
    verdict = judge(planted)[check]
    assert (verdict.status, verdict.update) == (DIFFERS, first)
    assert cause in verdict.text


def test_after_other_examples_no_later_check_blames_another_cause():
    planted = two_workers()
    same_shard(planted)
    scaled(0.5)(planted)
    found = judge(planted)
    assert [check for check, verdict in found.items() if verdict.status == DIFFERS] == ["same examples"]


def test_a_resume_that_skips_a_batch_differs_after_the_restored_update():
    resumed = two_workers()
    resumed["worker-0"][4:] = [head(update=2), update(3, (8, 71))]
    verdict = judge(two_workers(), resumed, killed_at=3)["resume exact"]
    assert (verdict.status, verdict.update) == (DIFFERS, 3)
    assert "killed after 3, resumed after 2: other examples than without the kill" in verdict.text


def test_layers_known_to_differ_are_named_and_not_failed():
    planted = two_workers()
    scaled(1.3)(planted)
    for entries in planted.values():
        entries[0]["differs"] = {"dropout": "draws other random numbers on each replica"}
    found = judge(planted)
    assert DIFFERS not in {verdict.status for verdict in found.values()}
    assert found["within rounding"].status == found["scale"].status == KNOWN
    assert "dropout draws other random numbers" in found["known differences"].text
    line = verdicts.conclusion(list(found.values()), "2 workers", UPDATES)
    assert line == "2 workers = 1 device, but for known differences, 5 updates"


def test_a_gradient_that_is_divided_twice_is_found_beside_a_known_difference():
    planted = two_workers()
    scaled(0.5)(planted)
    for entries in planted.values():
        entries[0]["differs"] = {"dropout": "draws other random numbers on each replica"}
    assert judge(planted)["scale"].status == DIFFERS


def test_differences_up_to_ten_times_the_envelope_are_rounding():
    again = one_device()
    again["worker-0"][1]["variables"]["dense/kernel"].update(checksum=0, sketch=[1.001, -1.0])
    planted = two_workers()
    change_variable("worker-0", 1, checksum=9, sketch=[1.005, -1.0])(planted)
    change_variable("worker-1", 1, checksum=9, sketch=[1.005, -1.0])(planted)
    a = Arm(one_device())
    assert verdicts.within_rounding(a, Arm(again), Arm(planted)).status == EQUAL
    assert verdicts.within_rounding(a, None, Arm(planted)).status == NOTE


@pytest.mark.parametrize(("dtype", "status"), [("float32", DIFFERS), ("bfloat16", EQUAL)])
def test_the_bound_of_rounding_is_that_of_the_type_in_which_layers_compute(dtype, status):
    planted = two_workers()
    scaled(1.001)(planted)
    alone = one_device()
    for entries in (*planted.values(), *alone.values()):
        entries[0]["types"] = {"dense": dtype}
    found = {verdict.check: verdict for verdict in verdicts.judge(Arm(alone), None, Arm(planted), None, "2 workers")}
    assert found["within rounding"].status == status
    assert found["precision used"].status != DIFFERS  # the layers have a policy of their own


def test_an_update_that_differs_although_its_gradient_does_not_is_amplified_rounding():
    planted = two_workers()
    for task in planted:
        change_variable(task, 2, checksum=9, sketch=[1.01, -1.0])(planted)
    verdict = judge(planted)["within rounding"]
    assert verdict.status == NOTE
    assert "the optimizer amplifies their rounding" in verdict.text


def test_a_script_without_a_seed_does_not_repeat_itself():
    again = one_device()
    again["worker-0"][0]["initial"] = {"dense/kernel": 2}
    first, *_ = verdicts.judge(Arm(one_device()), Arm(again), None, None, "2 workers")
    assert first.status == DIFFERS
    assert "keras.utils.set_random_seed" in first.text
